// SPDX-License-Identifier: Apache-2.0

// Package config owns the one typed configuration of a sidecar: its defaults, its strict YAML form, its checks and its
// documentation.
//
// Invariants: a Config that Load returned passed Validate; Default passes it too and binds to loopback only; every field
// carries its key, unit and meaning in struct tags, from which the documentation is generated. Values are read once at start and never change
// afterwards. No goroutines.
package config

import (
	"fmt"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"time"
)

// Config is everything that a sidecar can be told.
type Config struct {
	Node       string     `yaml:"node" doc:"Name of this node in logs, metrics and gossip. Unique in the cluster." default:"the host name and the process id"`
	Engine     Engine     `yaml:"engine" doc:"The unix socket that engines on this node connect to."`
	Peer       Peer       `yaml:"peer" doc:"How other sidecars find and authenticate this one."`
	Transports Transports `yaml:"transports" doc:"The data lanes."`
	Transfer   Transfer   `yaml:"transfer" doc:"The life of a transfer. Deadlines start fences; they never release blocks by themselves."`
	HTTP       HTTP       `yaml:"http" doc:"Health, metrics and the node description that routers read."`
	Log        Log        `yaml:"log" doc:"Logging, to standard error."`
	Trace      Trace      `yaml:"trace" doc:"Records for people who look for a fault. They name requests, so they are files and not metrics."`
	Drain      Drain      `yaml:"drain" doc:"What SIGTERM does: no new leases, those open run on."`

	origin origin
}

// Engine is the side towards the engines of this node.
type Engine struct {
	Socket      string `yaml:"socket" unit:"path" doc:"Unix socket. A directory that is missing is made with mode 0700, the socket with 0600; with allowed_uids 0711 and 0666, and the kernel's credentials of the caller decide." default:"$XDG_RUNTIME_DIR/kvspray.sock, else /tmp/kvspray-UID/kvspray.sock"`
	AllowedUIDs []int  `yaml:"allowed_uids" unit:"user ids" doc:"Users whose processes may connect besides the sidecar's own, for pods whose containers run under different users."`
	MaxSessions int    `yaml:"max_sessions" unit:"sessions" doc:"Engine sessions at once. Each worker rank and each scheduler is one."`
	MaxRegions  int    `yaml:"max_regions" unit:"regions" doc:"Memory regions that one session may register."`
	MaxLeases   int    `yaml:"max_leases" unit:"leases" doc:"Leases that one session may have open."`
}

// Peer is the side towards other sidecars.
type Peer struct {
	Listen         string `yaml:"listen" unit:"host:port" doc:"Where the control service and the control lanes listen. Port 0 takes a free one."`
	Advertise      string `yaml:"advertise" unit:"host:port" doc:"What peers and engines are told to dial, if that differs from the bound address. Port 0 means the bound port." default:"the bound address"`
	ClusterKeyFile string `yaml:"cluster_key_file" unit:"path" doc:"Shared secret of the cluster, made by 'kvspray keygen cluster': encrypts gossip and, where no certificates are given, authenticates peers. Mode 0600." default:"none: loopback only"`
	TLS            TLS    `yaml:"tls" doc:"Certificates for mutual TLS between peers, made by 'kvspray keygen' or by your own authority. All three or none."`
	Gossip         Gossip `yaml:"gossip" doc:"Who is there. Sidecars meet the members that it names before a request needs them. Advisory: a member that gossip calls dead keeps its leases until they are fenced."`
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
	Listen    string   `yaml:"listen" unit:"host:port or off" doc:"UDP and TCP address of the membership protocol. Port 0 takes a free one. On loopback it is opened only where there are members to join. 'off': peers are only known by the endpoints that requests carry."`
	Advertise string   `yaml:"advertise" unit:"host:port" doc:"Address that members are told, if it differs from the bound one." default:"the bound address"`
	Join      []string `yaml:"join" unit:"host:port list" doc:"Members to ask at start; each is retried until it answers."`
}

// Transports selects and tunes the backends.
type Transports struct {
	Order []string `yaml:"order" unit:"names" doc:"Backends to use, the preferred one first: shm (same host), gdr (RDMA), tcp. One that the host cannot do is skipped, with its reason in the log and in doctor."`
	Idle  Duration `yaml:"idle" unit:"duration" doc:"How long the lanes to a peer stay open after the last request that needed them. They open again when a request names the peer."`
	TCP   TCP      `yaml:"tcp" doc:"Plain TCP over one or more rails."`
	SHM   SHM      `yaml:"shm" doc:"Shared memory between processes of one host."`
	GPU   GPU      `yaml:"gpu" doc:"Memory of GPUs that engines register. A GPU is touched once an engine lends memory of it."`
	GDR   GDR      `yaml:"gdr" doc:"RDMA. Used where transports.order names gdr; docs/rdma.md says what a host needs."`
}

// GDR configures the RDMA backend.
type GDR struct {
	Rails        []string `yaml:"rails" unit:"device, device/port or device/port@gid-index" doc:"Ports to use. Each is a rail of its own. The GID is chosen where none is named: 'kvspray doctor' shows the tables, the choice and the reason." default:"every active port"`
	QueuePairs   int      `yaml:"queue_pairs" unit:"queue pairs per pair of rails" doc:"Queue pairs between each pair of rails."`
	DeadPath     Duration `yaml:"dead_path" unit:"duration" doc:"A path that does not answer is given up about so soon. Shorter than a congested fabric's worst pause, healthy rails fail."`
	Listen       string   `yaml:"listen" unit:"host" doc:"Address that lanes over InfiniBand ports are opened at. RoCE ports use that of their GID." default:"the host of peer.listen"`
	MTU          int      `yaml:"mtu" unit:"bytes: 256, 512, 1024, 2048 or 4096" doc:"Most payload of a packet; both ends use the smaller one." default:"the port's"`
	TrafficClass int      `yaml:"traffic_class" unit:"0 to 255" doc:"Traffic class of the packets: the DSCP, times four, on RoCE."`
	ServiceLevel int      `yaml:"service_level" unit:"0 to 15" doc:"InfiniBand service level, or the Ethernet priority of RoCE without a DSCP."`
}

// GPU configures how memory of GPUs is reached.
type GPU struct {
	Enabled  string `yaml:"enabled" unit:"auto or off" doc:"auto: used where there is an NVIDIA driver. off: engines that register memory of a GPU are refused."`
	Executor string `yaml:"executor" unit:"auto, pack, copy or engine" doc:"How scattered blocks cross between a GPU and the host. pack: a kernel packs them on the GPU, which waits beside a busy engine unless MPS runs. copy: the copy engine takes each by itself. engine: pack, with the kernel launched by a thread in the engine's process, which needs a library that can do that; what it does not take, copy does. auto: what takes less time, learned under the load that there is."`
	Buffers  int    `yaml:"buffers" unit:"buffers of 1 MiB" doc:"Pinned host memory per GPU, lent to lanes."`
	Table    string `yaml:"table" unit:"path, auto or off" doc:"What kvspray calibrate has measured of this host's models of GPU. auto: its own file in the user's cache folder, where it is there. off: what is built in, or learned."`
	Stage    Size   `yaml:"stage" unit:"bytes" doc:"One stage of the copy between two GPUs; 8 are held on each for every direction in use, and 16 on a GPU that two engines share."`
	Memory   Size   `yaml:"memory" unit:"bytes" doc:"Memory of each GPU that this sidecar allocates at most: 64 MiB of staging, and stages. Copies between GPUs for which no stages are left go through host memory. The driver's context, some 0.5 GiB, comes on top."`

	Open []string `yaml:"open" unit:"GPUs" doc:"GPUs whose context and staging are taken when the sidecar starts, so that an engine that starts later counts them: numbers, UUIDs as nvidia-smi -L prints them, or all. Others are opened once an engine lends memory of them."`
}

// TCP configures the tcp backend.
type TCP struct {
	Rails       []Rail `yaml:"rails" doc:"Local addresses to listen on and to dial from, or patterns of interface names. Each is a rail of its own. 'auto' is one pattern for every interface that leads beyond this host; without a cluster key or certificates it means the loopback interface. Interfaces that a pattern matches become rails, and stop being rails, while the sidecar runs. With --set: name@host:port, several with commas between, where the name is what logs and metrics call it, or auto." default:"one rail 'lo' on 127.0.0.1:0"`
	Connections int    `yaml:"connections" unit:"connections per pair of rails" doc:"Connections between each pair of rails."`
	Integrity   string `yaml:"integrity" unit:"off, crc32c or aead" doc:"What guards each payload. 'off' relies on TCP's own checksum. crc32c finds damage by accident, and costs about a third of the throughput where two cores do all the work. aead seals all that a lane carries (AES-128-GCM), so that nobody on the path can read or change it. A lane has the stronger of what its two ends ask for."`
	Slice       Size   `yaml:"slice" unit:"bytes" doc:"Bytes that one lane takes at a time at most; slow rails take less. A multiple of 64KiB."`
}

// Rail is one local address of the tcp backend, or a pattern of interfaces. The first entry that an interface fits decides.
type Rail struct {
	Name      string `yaml:"name" doc:"Name in logs and metrics. Unique on this node." default:"required, but with match: the interface's name"`
	Listen    string `yaml:"listen" unit:"host:port" doc:"Address of the interface. Port 0 takes a free one." default:"required, but with match"`
	Match     string `yaml:"match" unit:"pattern" doc:"Every interface whose name fits (* ? [a-z]) is a rail, as long as it has an address that leads beyond this host. The first entry that an interface fits decides. Instead of name and listen." default:"none"`
	Exclude   bool   `yaml:"exclude" unit:"true or false" doc:"With match: these interfaces are no rails." default:"false"`
	Advertise string `yaml:"advertise" unit:"host:port" doc:"What peers dial, if that differs from the bound address. Port 0 means the bound port." default:"the bound address"`
	Speed     Rate   `yaml:"speed" unit:"bits per second" doc:"Speed of the rail where the kernel cannot tell it." default:"asked from the kernel"`
	Tier      int    `yaml:"tier" unit:"0 to 3" doc:"How near the rail is to all memory of this node: 1 same PCIe switch, 2 same NUMA node, 3 another one. A far rail waits until the nearer ones have more than they can do at once." default:"0: asked from the PCI tree, for each engine's memory"`
}

// SHM configures the shm backend.
type SHM struct {
	Dir         string `yaml:"dir" unit:"path" doc:"Directory for the sockets over which sidecars of one host pass each other descriptors. Mode 0700." default:"the directory of the engine socket"`
	CopyThreads int    `yaml:"copy_threads" unit:"threads" doc:"Threads that copy." default:"half of the cores, at most 8"`
}

// Transfer bounds the life of a transfer.
type Transfer struct {
	Deadline    Duration `yaml:"deadline" unit:"duration" doc:"A transfer that has not committed by then is fenced, and the engine recomputes."`
	Partner     Duration `yaml:"partner" unit:"duration" doc:"How long one side waits for the other to appear."`
	Grace       Duration `yaml:"grace" unit:"duration" doc:"How long a fence or a stopped sidecar may take past the deadline before the next stronger means is used."`
	MaxSlices   int      `yaml:"max_slices" unit:"slices" doc:"Slices in flight over all lanes of one peer."`
	MaxAttempts int      `yaml:"max_attempts" unit:"attempts" doc:"Times that one slice is tried before the transfer fails with its blocks named."`
	Policy      string   `yaml:"policy" unit:"spray, round-robin or weighted" doc:"Who gets the next slice. spray: the rail that finishes it first, as learned. round-robin and weighted (by link speed) bind in a fixed order: for comparisons only."`
}

// HTTP configures the operators' endpoint.
type HTTP struct {
	Listen string `yaml:"listen" unit:"host:port or off" doc:"Serves /healthz, /readyz, /metrics and /v1/node. Port 0 takes a free one."`
}

// Log configures logging.
type Log struct {
	Level  string `yaml:"level" unit:"debug, info, warn or error" doc:"Least severe level that is written."`
	Format string `yaml:"format" unit:"text or json" doc:"Form of a line."`
}

// Trace configures per-transfer records.
type Trace struct {
	Transfers   string `yaml:"transfers" unit:"path" doc:"One JSON line for each transfer that ended is appended here, besides the log line." default:"none"`
	BlockHashes string `yaml:"block_hashes" unit:"path" doc:"The SHA-256 of every block that a transfer moved is appended here, on both sides, as JSON lines. Reads every byte once more: for tests, not for production." default:"none"`
}

// Drain configures the orderly stop.
type Drain struct {
	Timeout Duration `yaml:"timeout" unit:"duration" doc:"How long open transfers may take to end before they are fenced."`
}

// Defaults that other packages may want to name.
const (
	DefaultPeerPort   = 7650
	DefaultHTTPPort   = 7651
	DefaultGossipPort = 7652

	Off       = "off"
	CRC32C    = "crc32c"
	AEAD      = "aead"
	TransTCP  = "tcp"
	TransSHM  = "shm"
	TransGDR  = "gdr"
	FormText  = "text"
	FormJSON  = "json"
	LevelInfo = "info"

	PolicySpray      = "spray"
	PolicyRoundRobin = "round-robin"
	PolicyWeighted   = "weighted"
)

// Default is the configuration of a sidecar that was told nothing: everything on loopback.
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

// defaults holds what does not depend on the process.
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
			GPU:   GPU{Enabled: Auto, Executor: Auto, Buffers: 128, Table: Auto, Stage: 32 << 20, Memory: 2 << 30},
			GDR:   GDR{QueuePairs: 2, DeadPath: Duration(50 * time.Millisecond)},
		},
		Transfer: Transfer{
			Deadline: Duration(30 * time.Second), Partner: Duration(10 * time.Second), Grace: Duration(5 * time.Second),
			MaxSlices: 256, MaxAttempts: 8, Policy: PolicySpray,
		},
		HTTP:  HTTP{Listen: fmt.Sprintf("127.0.0.1:%d", DefaultHTTPPort)},
		Log:   Log{Level: LevelInfo, Format: FormText},
		Drain: Drain{Timeout: Duration(35 * time.Second)},
	}
}

// DefaultSocket is where an engine looks when it is told nothing; the shim has the same rule.
func DefaultSocket(runtimeDir string, uid int) string {
	if runtimeDir != "" {
		return filepath.Join(runtimeDir, "kvspray.sock")
	}
	return fmt.Sprintf("/tmp/kvspray-%d/kvspray.sock", uid)
}

// RailsOrDefault returns the tcp rails that have an address of their own: the loopback rail where none is configured, or where
// patterns may not match anything else because peers cannot be authenticated.
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

// RailFor returns the entry of transports.tcp.rails that decides about an interface; false: it is no rail.
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

// Auto is what 'auto' stands for among rails.
const Auto = "auto"

func autoRails() []Rail { return []Rail{{Match: "*"}} }

// SHMDir returns the directory of the shm backend.
func (c *Config) SHMDir() string {
	if c.Transports.SHM.Dir != "" {
		return c.Transports.SHM.Dir
	}
	return filepath.Dir(c.Engine.Socket)
}

// CopyThreads returns the number of copying threads on a machine of so many cores.
func (c *Config) CopyThreads(cores int) int {
	if n := c.Transports.SHM.CopyThreads; n > 0 {
		return n
	}
	return min(max(cores/2, 1), 8)
}

// Secured reports whether peers can be authenticated, which addresses off loopback need.
func (c *Config) Secured() bool { return c.Peer.ClusterKeyFile != "" || c.Peer.TLS.Set() }

// LogLevel returns the level as slog knows it.
func (c *Config) LogLevel() slog.Level {
	var l slog.Level
	if err := l.UnmarshalText([]byte(c.Log.Level)); err != nil {
		return slog.LevelInfo // Validate refused every other text
	}
	return l
}

// TablePath is where the table of GPUs is, empty where none is used, and whether somebody named it.
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
