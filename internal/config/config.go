// Package config owns the one typed configuration of a sidecar: its defaults, its strict YAML form,
// its checks and its documentation.
//
// Invariants: a Config that Load returned passed Validate; Default passes it too and binds to
// loopback only. The struct tags of every field hold its key, unit and meaning, and the
// documentation is generated from them. Values are read once at start and never change afterwards.
// No goroutines.
package config

import (
	"cmp"
	"fmt"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"
)

// Config is the whole configuration of a sidecar.
type Config struct {
	Node       string     `yaml:"node" doc:"Name of this node in logs, metrics and gossip. Unique in the cluster." default:"the host name and the process id"`
	Engine     Engine     `yaml:"engine" doc:"The unix socket that engines on this node connect to."`
	Peer       Peer       `yaml:"peer" doc:"How other sidecars find and authenticate this one."`
	Transports Transports `yaml:"transports" doc:"The data lanes."`
	Transfer   Transfer   `yaml:"transfer" doc:"Limits of a transfer. Deadlines start fences; they never release blocks by themselves."`
	Store      Store      `yaml:"store" doc:"Pages of engines' caches that this node keeps for later prompts. Off unless store.memory is set."`
	Segments   Segments   `yaml:"segments" doc:"Files of this node that peers may read and write in batches."`
	Health     Health     `yaml:"health" doc:"What faults of devices do."`
	HTTP       HTTP       `yaml:"http" doc:"Health, metrics and the node description that routers read."`
	Log        Log        `yaml:"log" doc:"Logging, to standard error."`
	Trace      Trace      `yaml:"trace" doc:"Records for finding faults. They contain request names, so they are files or spans, and not metrics."`
	Drain      Drain      `yaml:"drain" doc:"Orderly stop on SIGTERM: no new leases, open leases continue."`

	origin origin
}

// Engine configures the connection of the engines of this node.
type Engine struct {
	Socket      string `yaml:"socket" unit:"path" doc:"Unix socket. A missing directory is made with mode 0700, the socket with 0600. With allowed_uids the modes are 0711 and 0666, and the sidecar checks the caller's credentials from the kernel." default:"$XDG_RUNTIME_DIR/kvspray.sock, else /tmp/kvspray-UID/kvspray.sock"`
	AllowedUIDs []int  `yaml:"allowed_uids" unit:"user ids" doc:"Users besides the sidecar's own whose processes may connect, for pods whose containers run under different users."`
	AdminUIDs   []int  `yaml:"admin_uids" unit:"user ids" doc:"Users besides root and the sidecar's own whose processes may run 'kvspray drain', and those commands of 'kvspray store' that change this node or name its pages. The commands use a second socket: engine.socket with the suffix .admin, mode 0600, or 0666 with admin_uids. The sidecar checks the caller's credentials from the kernel."`
	API         string `yaml:"api" unit:"URL" doc:"API server of the engine, for routers that find engines by gossip (kvspray proxy --join), for instance http://10.0.0.7:8000. It replaces what the engine announces, and may be on another host than this one." default:"announced by the engine"`
	Role        string `yaml:"role" unit:"prefill, decode or both" doc:"What the engine computes, for the same routers. An engine that can do both may do one." default:"announced by the engine"`
	MaxSessions int    `yaml:"max_sessions" unit:"sessions" doc:"Largest number of engine sessions. Each worker rank and each scheduler has one, and ranks of SGLang one more for each kind of state."`
	MaxRegions  int    `yaml:"max_regions" unit:"regions" doc:"Largest number of memory regions of one session."`
	MaxLeases   int    `yaml:"max_leases" unit:"leases" doc:"Largest number of open leases of one session."`
}

// Peer configures the connections to other sidecars.
type Peer struct {
	Listen         string `yaml:"listen" unit:"host:port" doc:"Address of the control service and the control lanes. Port 0 takes a free one."`
	Advertise      string `yaml:"advertise" unit:"host:port" doc:"Address that peers and engines dial, if it differs from the bound address. Port 0 means the bound port." default:"the bound address"`
	ClusterKeyFile string `yaml:"cluster_key_file" unit:"path" doc:"Shared secret of the cluster, made by 'kvspray keygen cluster'. It encrypts gossip and, without certificates, authenticates peers. Mode 0600." default:"none: loopback only"`
	TLS            TLS    `yaml:"tls" doc:"Certificates for mutual TLS between peers, made by 'kvspray keygen' or by your own authority. All three or none."`
	Gossip         Gossip `yaml:"gossip" doc:"Membership. Sidecars connect to the listed members before a request needs them. Advisory: a member that gossip reports as dead keeps its leases until they are fenced."`
}

// TLS names certificate files in PEM form.
type TLS struct {
	Cert string `yaml:"cert" unit:"path" doc:"Certificate of this node." default:"none"`
	Key  string `yaml:"key" unit:"path" doc:"Private key of the certificate. Mode 0600." default:"none"`
	CA   string `yaml:"ca" unit:"path" doc:"Authority that signs the certificates of all peers." default:"none"`
}

// Set reports whether certificates are configured.
func (t TLS) Set() bool { return t.Cert != "" || t.Key != "" || t.CA != "" }

// Gossip is the membership protocol.
type Gossip struct {
	Listen    string   `yaml:"listen" unit:"host:port or off" doc:"UDP and TCP address of the membership protocol. Port 0 takes a free one. A loopback address is opened only if there are members to join, or engine.api is set. 'off': peers are known only by the endpoints in requests."`
	Advertise string   `yaml:"advertise" unit:"host:port" doc:"Address announced to members, if it differs from the bound one." default:"the bound address"`
	Join      []string `yaml:"join" unit:"host:port list" doc:"Members to contact at start; each is retried until it answers, and again whenever it is no member, as after a network partition."`
}

// Transports selects and tunes the backends.
type Transports struct {
	Order []string `yaml:"order" unit:"names" doc:"Backends, preferred first: shm (same host), gdr (RDMA), tcp. A backend that the host does not support is skipped, with the reason in the log and in doctor."`
	Idle  Duration `yaml:"idle" unit:"duration" doc:"How long the lanes to a peer stay open after the last request that used them. They open again when a request names the peer."`
	TCP   TCP      `yaml:"tcp" doc:"Plain TCP over one or more rails."`
	SHM   SHM      `yaml:"shm" doc:"Shared memory between processes of one host."`
	GPU   GPU      `yaml:"gpu" doc:"GPU memory that engines register. A GPU is not touched before an engine registers memory of it."`
	GDR   GDR      `yaml:"gdr" doc:"RDMA. Used if transports.order names gdr; docs/rdma.md lists the host's requirements."`
}

// GDR configures the RDMA backend.
type GDR struct {
	Rails        []string `yaml:"rails" unit:"device, device/port or device/port@gid-index" doc:"Ports to use. Each is a rail. Without an index the sidecar chooses the GID: 'kvspray doctor' shows the tables, the choice and the reason." default:"every active port"`
	QueuePairs   int      `yaml:"queue_pairs" unit:"queue pairs per pair of rails" doc:"Queue pairs per rail pair."`
	DeadAfter    Duration `yaml:"dead_after" unit:"duration" doc:"Time before an unresponsive path is declared dead. If it is shorter than the fabric's longest pause, healthy lanes end."`
	Listen       string   `yaml:"listen" unit:"host" doc:"Address for opening lanes over InfiniBand ports. RoCE ports use the address of their GID." default:"the host of peer.listen"`
	MTU          int      `yaml:"mtu" unit:"bytes: 256, 512, 1024, 2048 or 4096" doc:"Largest payload of a packet; both ends use the smaller value." default:"the port's"`
	TrafficClass int      `yaml:"traffic_class" unit:"0 to 255" doc:"Traffic class of the packets: the DSCP, times four, on RoCE."`
	ServiceLevel int      `yaml:"service_level" unit:"0 to 15" doc:"InfiniBand service level, or the Ethernet priority of RoCE without a DSCP."`
}

// GPU configures the access to GPU memory.
type GPU struct {
	Enabled    string `yaml:"enabled" unit:"auto or off" doc:"auto: used if there is an NVIDIA driver. off: engines that register GPU memory are refused."`
	CopyMethod string `yaml:"copy_method" unit:"auto, pack or copy" doc:"How scattered blocks are copied between a GPU and the host. pack: a kernel packs them on the GPU; beside a busy engine it waits unless MPS runs. copy: the copy engine copies each piece separately. auto: the faster method, learned under the current load."`
	Buffers    int    `yaml:"pinned_buffers" unit:"buffers of 1 MiB" doc:"Pinned host memory per GPU for the use of lanes."`
	Table      string `yaml:"calibration" unit:"path, auto or off" doc:"Results of kvspray calibrate for this host's GPU models. auto: the default file in the user's cache directory, if it exists. off: built-in or learned values."`
	Stage      Size   `yaml:"staging_buffer" unit:"bytes" doc:"Size of one staging buffer of the copy between two GPUs. Each GPU has 8 for every direction in use. Copies within one GPU need none."`
	Memory     Size   `yaml:"memory" unit:"bytes" doc:"Limit of the memory that this sidecar allocates on each GPU: 64 MiB of staging, the staging buffers of copies between GPUs, and 48 MiB for each other GPU whose copies it relays. Copies for which no buffers are left go through host memory. The driver's context, about 0.5 GiB, is not included."`

	Open   []string `yaml:"open" unit:"GPUs" doc:"GPUs whose context and staging the sidecar takes at its start, so that an engine that starts later counts them: numbers, UUIDs as nvidia-smi -L prints them, or all. Other GPUs are opened when an engine registers memory of them."`
	Relays []string `yaml:"relays" unit:"GPUs" doc:"GPUs whose PCIe links carry bytes of copies of other GPUs, even if no engine registers memory of them: numbers, UUIDs or all, as in open. The sidecar opens them at its start: a context of about 0.5 GiB, 64 MiB of staging, and 48 MiB for each GPU whose copies they relay. A GPU whose memory an engine has registered relays in any case. Of the relays of a GPU at most 7 are used: other PCIe switches and the same NUMA node first."`
}

// TCP configures the tcp backend.
type TCP struct {
	Rails       []Rail `yaml:"rails" doc:"Local addresses to listen on and to dial from, or patterns of interface names. Each address is a rail. 'auto' is one pattern for every interface that leads beyond this host; without a cluster key or certificates it means the loopback interface. Interfaces that match a pattern become rails, and stop being rails, while the sidecar runs. With --set: name@host:port, several separated by commas, where logs and metrics show the name; or auto." default:"one rail 'lo' on 127.0.0.1:0"`
	Connections int    `yaml:"connections" unit:"connections per pair of rails" doc:"Connections per rail pair."`
	Integrity   string `yaml:"integrity" unit:"off, crc32c or aead" doc:"Protection of each payload. off: only TCP's own checksum. crc32c: detects accidental damage, and costs about a third of the throughput if two cores do all the work. aead: encrypts and authenticates all data of a lane (AES-128-GCM). A lane uses the stronger setting of its two ends."`
	Slice       Size   `yaml:"slice" unit:"bytes" doc:"Largest slice of one lane; slow rails get smaller ones. A multiple of 64KiB."`
}

// Rail is one local address of the tcp backend, or a pattern of interfaces. The first matching
// entry decides about an interface.
type Rail struct {
	Name      string `yaml:"name" doc:"Name in logs and metrics. Unique on this node." default:"required, but with match: the interface's name"`
	Listen    string `yaml:"listen" unit:"host:port" doc:"Address of the interface. Port 0 takes a free one." default:"required, but with match"`
	Match     string `yaml:"match" unit:"pattern" doc:"Every interface whose name matches (* ? [a-z]) is a rail while it has an address that leads beyond this host. The first matching entry decides. Instead of name and listen." default:"none"`
	Exclude   bool   `yaml:"exclude" unit:"true or false" doc:"Exclude interfaces matched by match." default:"false"`
	Advertise string `yaml:"advertise" unit:"host:port" doc:"Address that peers dial, if it differs from the bound address. Port 0 means the bound port." default:"the bound address"`
	Speed     Rate   `yaml:"speed" unit:"bits per second" doc:"Speed of the rail, if the kernel does not report it." default:"asked from the kernel"`
	Tier      int    `yaml:"distance" unit:"0 to 3" doc:"Distance of the rail from all memory of this node: 1 same PCIe switch, 2 same NUMA node, 3 other node. A distant rail waits until the nearer ones are busy." default:"0: asked from the PCI tree, for each engine's memory"`
}

// SHM configures the shm backend.
type SHM struct {
	Dir         string `yaml:"dir" unit:"path" doc:"Directory of the sockets over which sidecars of one host pass descriptors. Mode 0700." default:"the directory of the engine socket"`
	CopyThreads int    `yaml:"copy_threads" unit:"threads" doc:"Copying threads." default:"half of the cores, at most 8"`
}

// Transfer bounds transfers.
type Transfer struct {
	Deadline     Duration `yaml:"deadline" unit:"duration" doc:"Longest time of a transfer until its commit. After it the transfer is fenced, and the engine recomputes."`
	MatchTimeout Duration `yaml:"match_timeout" unit:"duration" doc:"Match timeout: longest wait for the other side of a transfer."`
	Hold         Duration `yaml:"hold_timeout" unit:"duration" doc:"Longest time that the blocks of a finished prefill are held for a decode engine that lives and whose request waits in its queue. At most 10m."`
	Grace        Duration `yaml:"grace" unit:"duration" doc:"Time after the deadline that a fence or a stopped sidecar has before the next stronger measure."`
	MaxSlices    int      `yaml:"max_slices" unit:"slices" doc:"Largest number of slices in flight over all lanes of one peer."`
	MaxAttempts  int      `yaml:"max_attempts" unit:"attempts" doc:"Attempts to move a chunk before the transfer fails with its blocks named."`
}

// Segments configures files as segments.
type Segments struct {
	Root string `yaml:"root" unit:"path" doc:"Directory whose files engines of this node may register as segments, with the rights of the sidecar's user. Paths that leave it, and symbolic links, are refused." default:"none: no files"`
}

// Store configures the node's store of pages.
type Store struct {
	Memory      Size         `yaml:"memory" unit:"bytes" doc:"Memory for pages. 0B: this node has no store."`
	Disk        []StoreDisk  `yaml:"disk" doc:"Where pages go that memory gives up: files, directories or block devices. With --set: path=size, several separated by commas."`
	WriteBack   bool         `yaml:"write_back" unit:"true or false" doc:"false: a put ends when its pages are on the disk. true: it ends when they are in memory, and they go to the disk afterwards."`
	Object      StoreObject  `yaml:"object" doc:"Object store below memory and disk, over S3's API. Off unless its bucket is set. The sidecar does not start with a service that does not list in the order of names, or that ignores If-Match and If-None-Match. Credentials come from the environment, the shared credentials file or the instance's role."`
	Segment     Size         `yaml:"segment" unit:"bytes" doc:"Segment of a new disk tier: what is written in sequence, and cleaned together. A power of two of 1MiB to 1GiB. An existing store keeps its own." default:"64MiB, less if a disk is smaller than 1GiB"`
	EraseWithin Duration     `yaml:"erase_within" unit:"duration" doc:"Time in which the bytes of removed namespaces are overwritten on disks. A page of a removed namespace is not served from the confirmation of the removal on. A shorter time causes more writes: the other pages of a segment are moved first."`
	Quota       Portion      `yaml:"memory_quota" unit:"bytes or percent" doc:"Maximum memory of one namespace: the cache of one model on one rank, and of one tenant. A namespace that has reached it gives up its own pages for new ones. 0B: no limit."`
	Generation  string       `yaml:"generation" unit:"text" doc:"Part of the names of all pages. A sidecar finds only pages of its own generation, so another text hides all earlier pages, for instance after a kernel of the engines has computed wrong values. All sidecars need the same text."`
	Directory   string       `yaml:"directory" unit:"embedded, redis or off" doc:"Where sidecars look for pages that others hold. embedded: in the sidecars themselves. redis: in a Redis or Valkey service. off: not at all. It has effect with peer.gossip, and only hints are kept there."`
	Redis       StoreRedis   `yaml:"redis" doc:"The service of store.directory redis."`
	DiskQuota   Portion      `yaml:"disk_quota" unit:"bytes or percent" doc:"Maximum disk space of one namespace. 0B: no limit."`
	ObjectQuota Portion      `yaml:"object_quota" unit:"bytes or percent" doc:"Maximum space of one namespace in the object store. 0B: no limit."`
	Namespaces  []StoreQuota `yaml:"namespaces" doc:"Namespaces with other quotas than these."`
}

// StoreQuota are the quotas of one namespace.
type StoreQuota struct {
	ID          string  `yaml:"id" unit:"64 hexadecimal digits" doc:"The namespace, as 'kvspray store ls' prints it." default:"required"`
	Quota       Portion `yaml:"memory_quota" unit:"bytes or percent" doc:"As store.memory_quota." default:"store.memory_quota"`
	DiskQuota   Portion `yaml:"disk_quota" unit:"bytes or percent" doc:"As store.disk_quota." default:"store.disk_quota"`
	ObjectQuota Portion `yaml:"object_quota" unit:"bytes or percent" doc:"As store.object_quota." default:"store.object_quota"`
}

// Quotas are the maximum bytes of a namespace in memory, on disks and in the object store; 0: no limit.
func (s *Store) Quotas(id string) (memory, disk, object uint64) {
	q := StoreQuota{}
	for _, n := range s.Namespaces {
		if strings.EqualFold(n.ID, id) {
			q = n
		}
	}
	return cmp.Or(q.Quota, s.Quota).Of(s.Memory), cmp.Or(q.DiskQuota, s.DiskQuota).Of(s.diskSize()),
		cmp.Or(q.ObjectQuota, s.ObjectQuota).Of(s.Object.Size)
}

func (s *Store) diskSize() (sum Size) {
	for _, d := range s.Disk {
		sum += d.Size
	}
	return sum
}

// StoreDisk is one place of the store's disk tier.
type StoreDisk struct {
	Path string `yaml:"path" unit:"path" doc:"A file or block device of the store alone, or a directory for its file. A new file takes its whole size at once. A file that is not a store's is refused." default:"required"`
	Size Size   `yaml:"size" unit:"bytes" doc:"Its size. An existing store keeps its own; a block device is used whole." default:"required"`
}

// StoreObject is the store's tier in an object store.
type StoreObject struct {
	Endpoint string `yaml:"endpoint" unit:"URL" doc:"The service." default:"AWS in the region"`
	Region   string `yaml:"region" unit:"name" doc:"The service's region." default:"AWS_REGION, else us-east-1"`
	Bucket   string `yaml:"bucket" unit:"name" doc:"An existing bucket." default:"none: no object store"`
	Prefix   string `yaml:"prefix" unit:"path" doc:"Beginning of the names of all objects. Each sidecar needs its own: two that share one lose pages, and serve none that is wrong." default:"required"`
	Size     Size   `yaml:"size" unit:"bytes" doc:"Bytes of objects that the tier aims at." default:"required"`
	AtPut    bool   `yaml:"at_put" unit:"true or false" doc:"false: pages go there when no other tier keeps them. true: at their put."`
}

// StoreRedis is the service of the directory.
type StoreRedis struct {
	Addresses    []string `yaml:"addresses" unit:"host:port" doc:"Its servers. Several are those of a cluster." default:"required"`
	Username     string   `yaml:"username" unit:"name" doc:"User of its access list." default:"none"`
	PasswordFile string   `yaml:"password_file" unit:"path" doc:"File with the password. Mode 0600." default:"none"`
	TLS          bool     `yaml:"tls" unit:"true or false" doc:"Encrypts the connections, and checks the servers' certificates by the system's authorities."`
	Prefix       string   `yaml:"prefix" unit:"name" doc:"Beginning of all keys. Clusters that share a service need one each."`
}

// Set reports whether anything is configured.
func (r *StoreRedis) Set() bool {
	return len(r.Addresses) > 0 || r.Username != "" || r.PasswordFile != "" || r.TLS
}

// Directories of a store.
const (
	DirEmbedded = "embedded"
	DirRedis    = "redis"
)

// GossipOn reports whether gossip is used: on loopback without other members, or an engine for
// routers, it would only use CPU.
func (c *Config) GossipOn() bool {
	g := &c.Peer.Gossip
	return g.Listen != "" && g.Listen != Off &&
		(len(g.Join) > 0 || c.Engine.API != "" || !IsLoopback(g.Listen))
}

// Health configures what faults of devices do.
type Health struct {
	GPUs  string `yaml:"gpus" unit:"leave, report or off" doc:"A GPU whose driver reports a fault of its own (docs/health.md). leave: leases of its engine fail, and routers send nothing to an engine that they have found by --join, nor to a sidecar whose engines have all failed; if the GPU is only slow, or other engines of a listed sidecar work, routers prefer other engines. report: only status, doctor and metrics show it. off: GPUs are not watched."`
	Rails string `yaml:"rails" unit:"exclude, report or off" doc:"An interface of a rail whose link flaps or whose counters show many errors. exclude: the rail is out of use for a time, unless it is the last one of its transport. report: only status, doctor and metrics show it. off: counters are not read. A link without a carrier is out of use in any case."`
}

// HTTP configures the operators' endpoint.
type HTTP struct {
	Listen string   `yaml:"listen" unit:"host:port or off" doc:"Serves /healthz, /readyz, /metrics and /v1/node. Port 0 takes a free one."`
	Hosts  []string `yaml:"hosts" unit:"names" doc:"Host names that requests to http.listen may have, besides IP addresses, localhost, the host's own name and that of peer.advertise. '*.example.com' stands for all names below example.com. Requests for other names are refused: a web page whose name resolves to this host could otherwise read the port through a browser (DNS rebinding)."`
}

// Log configures logging.
type Log struct {
	Level  string `yaml:"level" unit:"debug, info, warn or error" doc:"Least severe level that is logged."`
	Format string `yaml:"format" unit:"text or json" doc:"Format of a log line."`
}

// Trace configures per-transfer records.
type Trace struct {
	Transfers   string `yaml:"transfers" unit:"path" doc:"File for one JSON line per ended transfer, in addition to the log line." default:"none"`
	OTLP        string `yaml:"otlp" unit:"URL" doc:"OpenTelemetry collector that gets spans of transfers, by OTLP over HTTP with protobuf, for instance http://127.0.0.1:4318. Without a path it gets them at /v1/traces. Only requests with a sampled W3C traceparent have spans: the router makes or passes it. docs/tracing.md has the spans." default:"none: off"`
	BlockHashes string `yaml:"block_hashes" unit:"path" doc:"File for the SHA-256 of every moved block, on both sides, as JSON lines. Reads every byte once more: for tests, not for production." default:"none"`
}

// Drain configures the orderly stop.
type Drain struct {
	Timeout Duration `yaml:"timeout" unit:"duration" doc:"Time for open transfers to end before they are fenced."`
}

// Defaults that other packages use.
const (
	DefaultPeerPort   = 7650
	DefaultHTTPPort   = 7651
	DefaultGossipPort = 7652

	Off       = "off"
	Leave     = "leave"
	Exclude   = "exclude"
	Report    = "report"
	CRC32C    = "crc32c"
	AEAD      = "aead"
	TransTCP  = "tcp"
	TransSHM  = "shm"
	TransGDR  = "gdr"
	FormText  = "text"
	FormJSON  = "json"
	LevelInfo = "info"
)

// Default is the configuration without file and flags: everything on loopback.
func Default() *Config {
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = "localhost"
	}
	c := defaults()
	c.Node = fmt.Sprintf("%s-%d", host, os.Getpid())
	c.Engine.Socket = DefaultSocket(os.Getenv("XDG_RUNTIME_DIR"), os.Getuid())
	return c
}

// defaults holds the values that do not depend on the process.
func defaults() *Config {
	return &Config{
		Engine: Engine{MaxSessions: 64, MaxRegions: 1024, MaxLeases: 8192},
		Peer: Peer{
			Listen: fmt.Sprintf("127.0.0.1:%d", DefaultPeerPort),
			Gossip: Gossip{Listen: fmt.Sprintf("127.0.0.1:%d", DefaultGossipPort)},
		},
		Transports: Transports{
			Order: []string{TransSHM, TransTCP},
			Idle:  Duration(time.Minute),
			TCP:   TCP{Connections: 2, Integrity: CRC32C, Slice: 1 << 20},
			GPU: GPU{Enabled: Auto, CopyMethod: Auto, Buffers: 128, Table: Auto, Stage: 32 << 20,
				Memory: 2 << 30},
			GDR: GDR{QueuePairs: 2, DeadAfter: Duration(50 * time.Millisecond)},
		},
		Transfer: Transfer{
			Deadline: Duration(30 * time.Second), MatchTimeout: Duration(10 * time.Second),
			Hold: Duration(2 * time.Minute), Grace: Duration(5 * time.Second),
			MaxSlices: 256, MaxAttempts: 8,
		},
		Health: Health{GPUs: Leave, Rails: Exclude},
		HTTP:   HTTP{Listen: fmt.Sprintf("127.0.0.1:%d", DefaultHTTPPort)},
		Log:    Log{Level: LevelInfo, Format: FormText},
		Store: Store{Directory: DirEmbedded, Redis: StoreRedis{Prefix: "kvspray:"}, Quota: "0B",
			DiskQuota: "0B", ObjectQuota: "0B", EraseWithin: Duration(time.Hour)},
		Drain: Drain{Timeout: Duration(35 * time.Second)},
	}
}

// DefaultSocket is the default socket of sidecars and engines; the shim uses the same rule.
func DefaultSocket(runtimeDir string, uid int) string {
	if runtimeDir != "" {
		return filepath.Join(runtimeDir, "kvspray.sock")
	}
	return fmt.Sprintf("/tmp/kvspray-%d/kvspray.sock", uid)
}

// AdminSocket is the path of the socket for calls that change a sidecar, beside that of engines.
func AdminSocket(engine string) string { return engine + adminSuffix }

// RailsOrDefault returns the tcp rails with addresses of their own: the loopback rail if none is
// configured, or if patterns may match nothing else because peers cannot be authenticated.
func (c *Config) RailsOrDefault() (out []Rail) {
	for _, r := range c.Transports.TCP.Rails {
		if r.Match == "" {
			out = append(out, r)
		}
	}
	if len(out) == 0 && (len(c.Transports.TCP.Rails) == 0 || !c.Secured()) {
		return []Rail{{Name: "lo", Listen: "127.0.0.1:0"}}
	}
	return out
}

// RailFor returns the entry of transports.tcp.rails that decides about an interface; false: not a
// rail.
func (c *Config) RailFor(name string) (Rail, bool) {
	if !c.Secured() {
		return Rail{}, false // loopback only
	}
	for _, r := range c.Transports.TCP.Rails {
		if ok, err := path.Match(r.Match, name); r.Match != "" && err == nil && ok {
			return r, !r.Exclude
		}
	}
	return Rail{}, false
}

// Auto is the value 'auto' for rails.
const Auto = "auto"

func autoRails() []Rail { return []Rail{{Match: "*"}} }

// SHMDir returns the directory of the shm backend.
func (c *Config) SHMDir() string {
	if c.Transports.SHM.Dir != "" {
		return c.Transports.SHM.Dir
	}
	return filepath.Dir(c.Engine.Socket)
}

// CopyThreads returns the number of copying threads on a machine with the given cores.
func (c *Config) CopyThreads(cores int) int {
	if n := c.Transports.SHM.CopyThreads; n > 0 {
		return n
	}
	return min(max(cores/2, 1), 8)
}

// Secured reports whether peers can be authenticated, as addresses off loopback require.
func (c *Config) Secured() bool { return c.Peer.ClusterKeyFile != "" || c.Peer.TLS.Set() }

// Severity returns the level for slog.
func (l Log) Severity() slog.Level {
	var level slog.Level
	if err := level.UnmarshalText([]byte(l.Level)); err != nil {
		return slog.LevelInfo // Validate refused every other text
	}
	return level
}

// TablePath returns the path of the table of GPUs, empty for none, and whether the configuration
// names it.
func (g *GPU) TablePath() (path string, named bool) {
	switch g.Table {
	case Off:
		return "", false
	case Auto:
		dir, err := os.UserCacheDir()
		if err != nil {
			return "", false
		}
		return filepath.Join(dir, "kvspray", "gpu.json"), false
	}
	return g.Table, true
}
