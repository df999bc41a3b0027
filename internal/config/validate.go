package config

import (
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvspray/kvspray/internal/redact"
)

// maxHold bounds transfer.hold_timeout: no lease lives longer.
const maxHold = Duration(10 * time.Minute)

// Limits of a configuration.
const (
	adminSuffix    = ".admin"
	maxSocketPath  = 107 - len(adminSuffix) // bytes of sun_path without its end
	maxHosts       = 64                     // names
	chunkBytes     = 64 << 10
	maxSlice       = 64 << 20
	maxConnections = 64
	minStage       = 1 << 20
	maxStage       = 64 << 20
	minGPUMemory   = 64 << 20
	maxGPUMemory   = 64 << 30
	maxGPUs        = 16
	maxRails       = 64
	maxDisks       = 64
	namespaceBytes = 32   // of an id
	maxGeneration  = 128  // bytes
	maxNamespaces  = 1024 // with quotas of their own: a store has no more
	minStoreMemory = 1 << 20
	maxStoreMemory = 16 << 40
	minStoreDisk   = 64 << 20
	minStoreObject = 128 << 20
	maxStoreObject = 8 << 40 // what store/object can name in objects of its default size
	minSegment     = 1 << 20
	maxSegment     = 1 << 30
	maxStoreDisk   = 256 << 40
	maxThreads     = 256
	maxDuration    = 24 * time.Hour
	maxNameBytes   = 128
	maxAPIBytes    = 256
)

// Validate checks values and their combinations. It opens no file; CheckFiles does.
func (c *Config) Validate() error {
	v := checker{origin: &c.origin, c: c}
	v.name("node", c.Node, maxNameBytes)

	v.check(c.Engine.Socket != "", "engine.socket", c.Engine.Socket, "empty", "name a path")
	v.check(len(c.Engine.Socket) <= maxSocketPath, "engine.socket", c.Engine.Socket,
		fmt.Sprintf("longer than %d bytes: a unix socket address has 107, and the path of the admin "+
			"socket beside it has the suffix %q", maxSocketPath, adminSuffix),
		"use a shorter path, for instance below /run")
	v.check(strings.HasPrefix(c.Engine.Socket, "/"), "engine.socket", c.Engine.Socket,
		"not an absolute path", "start it with /")
	for i, uid := range c.Engine.AllowedUIDs {
		v.between(fmt.Sprintf("engine.allowed_uids[%d]", i), uid, 0, 1<<31-1)
	}
	for i, uid := range c.Engine.AdminUIDs {
		v.between(fmt.Sprintf("engine.admin_uids[%d]", i), uid, 0, 1<<31-1)
	}
	if raw := c.Engine.API; raw != "" {
		u, err := url.Parse(raw)
		v.check(err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != "" &&
			u.User == nil && u.RawQuery == "" && u.Fragment == "" && len(raw) <= maxAPIBytes,
			"engine.api", redact.URL(raw), "not a URL of an HTTP server without user and query",
			"write http://HOST:PORT; a URL with a password belongs in the router's file")
	}
	if c.Engine.Role != "" {
		v.oneOf("engine.role", c.Engine.Role, RolePrefill, RoleDecode, RoleBoth)
	}
	v.between("engine.max_sessions", c.Engine.MaxSessions, 1, 1024)
	v.between("engine.max_regions", c.Engine.MaxRegions, 1, 4096)
	v.between("engine.max_leases", c.Engine.MaxLeases, 1, 1<<16)

	v.bind("peer.listen", c.Peer.Listen, false)
	v.advertise("peer", c.Peer.Listen, c.Peer.Advertise)
	if t := c.Peer.TLS; t.Set() {
		v.check(t.Cert != "", "peer.tls.cert", t.Cert, "missing", "give cert, key and ca together")
		v.check(t.Key != "", "peer.tls.key", t.Key, "missing", "give cert, key and ca together")
		v.check(t.CA != "", "peer.tls.ca", t.CA, "missing", "give cert, key and ca together")
	}
	v.bind("peer.gossip.listen", c.Peer.Gossip.Listen, true)
	if c.Peer.Gossip.Listen != Off {
		v.advertise("peer.gossip", c.Peer.Gossip.Listen, c.Peer.Gossip.Advertise)
		v.check(IsLoopback(c.Peer.Gossip.Listen) || c.Peer.ClusterKeyFile != "", "peer.gossip.listen",
			c.Peer.Gossip.Listen,
			"gossip off loopback must be encrypted, and no key is configured",
			"set peer.cluster_key_file to a file made by 'kvspray keygen cluster', or gossip.listen to off")
	}
	v.check(c.Peer.Gossip.Listen != Off || len(c.Peer.Gossip.Join) == 0, "peer.gossip.join",
		strings.Join(c.Peer.Gossip.Join, ","),
		"members to join although gossip is off", "set peer.gossip.listen or remove join")
	for i, a := range c.Peer.Gossip.Join {
		v.dial(fmt.Sprintf("peer.gossip.join[%d]", i), a)
	}

	v.transports()

	v.duration("transfer.deadline", c.Transfer.Deadline, 100*time.Millisecond)
	v.duration("transfer.match_timeout", c.Transfer.MatchTimeout, 100*time.Millisecond)
	v.duration("transfer.hold_timeout", c.Transfer.Hold, 100*time.Millisecond)
	v.check(c.Transfer.Hold <= maxHold, "transfer.hold_timeout", c.Transfer.Hold.String(),
		fmt.Sprintf("longer than %v", time.Duration(maxHold)), "make it shorter")
	v.duration("transfer.grace", c.Transfer.Grace, 100*time.Millisecond)
	v.check(c.Transfer.MatchTimeout <= c.Transfer.Deadline, "transfer.match_timeout",
		c.Transfer.MatchTimeout.String(),
		fmt.Sprintf("longer than transfer.deadline (%v)", c.Transfer.Deadline), "make it shorter, or "+
			"the deadline longer")
	v.between("transfer.max_slices", c.Transfer.MaxSlices, 1, 1<<16)
	v.between("transfer.max_attempts", c.Transfer.MaxAttempts, 1, 100)

	v.store()
	v.check(c.Segments.Root == "" || filepath.IsAbs(c.Segments.Root), "segments.root", c.Segments.Root,
		"not an absolute path", "start it with /")

	v.bind("http.listen", c.HTTP.Listen, true)
	v.check(len(c.HTTP.Hosts) <= maxHosts, "http.hosts", strconv.Itoa(len(c.HTTP.Hosts)),
		"too many names", fmt.Sprintf("%d at most", maxHosts))
	for i, h := range c.HTTP.Hosts {
		v.check(hostName.MatchString(h), fmt.Sprintf("http.hosts[%d]", i), h, "not a name of a host",
			"write a name without a port, or *.example.com for all names below example.com")
	}
	v.distinct()
	v.oneOf("health.gpus", c.Health.GPUs, Leave, Report, Off)
	v.oneOf("health.rails", c.Health.Rails, Exclude, Report, Off)
	v.log(c.Log)
	v.otlp("trace.otlp", c.Trace.OTLP)
	v.duration("drain.timeout", c.Drain.Timeout, 0)
	return errors.Join(v.errs...)
}

func (v *checker) log(l Log) {
	v.oneOf("log.level", l.Level, "debug", LevelInfo, "warn", "error")
	v.oneOf("log.format", l.Format, FormText, FormJSON)
}

// distinct refuses two listeners on one port, which would end the start halfway.
func (v *checker) distinct() {
	type listener struct{ key, addr string }
	all := []listener{{"peer.listen", v.c.Peer.Listen}, {"http.listen", v.c.HTTP.Listen},
		{"peer.gossip.listen", v.c.Peer.Gossip.Listen}}
	for i, r := range v.c.Transports.TCP.Rails {
		all = append(all, listener{fmt.Sprintf("transports.tcp.rails[%d].listen", i), r.Listen})
	}
	seen := map[string]string{}
	for _, l := range all {
		if _, port, err := net.SplitHostPort(l.addr); err != nil || port == "0" {
			continue // off, reported by bind, or port 0
		}
		first, taken := seen[l.addr]
		v.check(!taken, l.key, l.addr, "also the address of "+first,
			"choose another port, or 0 for a free one")
		seen[l.addr] = l.key
	}
}

func (v *checker) store() {
	st := v.c.Store
	if st.Memory == 0 {
		v.check(st.Object == StoreObject{}, "store.object", st.Object.Bucket,
			"an object store of a store that is off", "set store.memory, or remove store.object")
		v.check(len(st.Disk) == 0, "store.disk", strconv.Itoa(len(st.Disk)),
			"disks of a store that is off", "set store.memory, or remove store.disk")
		v.check(!st.Redis.Set(), "store.redis", strings.Join(st.Redis.Addresses, ","),
			"a directory of a store that is off", "set store.memory, or remove store.redis")
		return
	}
	v.directory()
	v.size("store.memory", st.Memory, minStoreMemory, maxStoreMemory)
	v.check(len(st.Generation) <= maxGeneration, "store.generation", st.Generation,
		fmt.Sprintf("%d bytes", len(st.Generation)), fmt.Sprintf("use at most %d", maxGeneration))
	v.quotas("store.", st.Quota, st.DiskQuota, st.ObjectQuota)
	v.check(len(st.Namespaces) <= maxNamespaces, "store.namespaces", strconv.Itoa(len(st.Namespaces)),
		"too many namespaces", fmt.Sprintf("%d at most", maxNamespaces))
	named := map[string]string{}
	for i, n := range st.Namespaces {
		key := fmt.Sprintf("store.namespaces[%d]", i)
		id, err := hex.DecodeString(n.ID)
		v.check(err == nil && len(id) == namespaceBytes, key+".id", n.ID, "not 64 hexadecimal digits",
			"write one that 'kvspray store ls' prints")
		v.check(named[string(id)] == "", key+".id", n.ID, "also the id of "+named[string(id)],
			"name each namespace once")
		named[string(id)] = key
		v.quotas(key+".", n.Quota, n.DiskQuota, n.ObjectQuota)
	}
	v.check(st.Segment == 0 || st.Segment >= minSegment && st.Segment <= maxSegment &&
		st.Segment&(st.Segment-1) == 0, "store.segment", st.Segment.String(),
		"not a power of two of 1MiB to 1GiB", "choose one, or leave it out")
	v.check(len(st.Disk) <= maxDisks, "store.disk", strconv.Itoa(len(st.Disk)), "too many disks",
		fmt.Sprintf("%d at most", maxDisks))
	v.duration("store.erase_within", st.EraseWithin, time.Second)
	v.check(!st.WriteBack || len(st.Disk) > 0, "store.write_back", "true",
		"there is no disk to write to", "add store.disk, or leave it out")
	if o := st.Object; o.Bucket != "" {
		v.check(o.Prefix != "", "store.object.prefix", o.Prefix, "missing",
			"name one for this sidecar alone")
		v.size("store.object.size", o.Size, minStoreObject, maxStoreObject)
		v.check(o.Endpoint == "" || strings.HasPrefix(o.Endpoint, "http://") ||
			strings.HasPrefix(o.Endpoint, "https://"), "store.object.endpoint", redact.URL(o.Endpoint),
			"not a URL", "start it with https:// or http://")
		v.check(!strings.Contains(o.Endpoint, "@"), "store.object.endpoint", redact.URL(o.Endpoint),
			"contains a user or a password", "leave them out: credentials come from the environment, the "+
				"shared credentials file or the instance's role")
	} else {
		v.check(o == StoreObject{}, "store.object.bucket", "", "missing", "name a bucket, or remove "+
			"store.object")
	}
	seen := map[string]string{}
	for i, d := range st.Disk {
		key := fmt.Sprintf("store.disk[%d]", i)
		v.check(strings.HasPrefix(d.Path, "/"), key+".path", d.Path, "not an absolute path",
			"start it with /")
		v.size(key+".size", d.Size, minStoreDisk, maxStoreDisk)
		clean := path.Clean(d.Path)
		v.check(seen[clean] == "", key+".path", d.Path, "also the path of "+seen[clean],
			"give each entry a path of its own")
		seen[clean] = key
	}
}

// hostName is a name, or all names below one.
var hostName = regexp.MustCompile(`^(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?$`)

// quotas checks those of all namespaces, or of one.
func (v *checker) quotas(prefix string, memory, disk, object Portion) {
	st := &v.c.Store
	v.check(memory.Of(st.Memory) <= uint64(st.Memory), prefix+"memory_quota", string(memory),
		"more than store.memory ("+st.Memory.String()+")", "lower it, or leave it out")
	for _, q := range []struct {
		key, tier, what string
		p               Portion
		size            Size
	}{{"disk_quota", "store.disk", "there is no disk", disk, st.diskSize()},
		{"object_quota", "store.object", "there is no object store", object, st.Object.Size}} {
		set := q.p != "" && q.p != "0B"
		v.check(!set || q.size > 0, prefix+q.key, string(q.p), q.what, "add "+q.tier+
			", or leave it out")
	}
}

func (v *checker) directory() {
	st := &v.c.Store
	v.oneOf("store.directory", st.Directory, DirEmbedded, DirRedis, Off)
	if st.Directory != DirRedis {
		v.check(!st.Redis.Set(), "store.redis", "", "the directory is not in Redis",
			"set store.directory to redis, or remove store.redis")
		return
	}
	v.check(len(st.Redis.Addresses) > 0, "store.redis.addresses", "", "missing",
		"name the service's host:port")
	for i, a := range st.Redis.Addresses {
		_, _, err := net.SplitHostPort(a)
		v.check(err == nil && !strings.Contains(a, "@"), fmt.Sprintf("store.redis.addresses[%d]", i),
			redact.URL(a), "not host:port", "write both, and the password into store.redis.password_file")
	}
	v.check(v.c.GossipOn(), "store.directory", DirRedis, "peer.gossip is off, and sidecars "+
		"learn of each other by it", "set peer.gossip.join, or store.directory to off")
}

// otlp checks the URL of a collector of traces.
func (v *checker) otlp(key, raw string) {
	if raw == "" {
		return
	}
	const example = "write for instance http://127.0.0.1:4318"
	shown := redact.URL(raw)
	v.check(!strings.Contains(raw, "@"), key, shown, "contains a user or a password",
		"leave them out, and "+
			"set OTEL_EXPORTER_OTLP_HEADERS=authorization=... for the sidecar")
	u, err := url.Parse(raw)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Hostname() == "" {
		v.check(false, key, shown, "not a URL of HTTP", example)
		return
	}
	v.check(u.RawQuery == "" && u.Fragment == "", key, shown, "has a query or a fragment", example)
}

func (v *checker) gdr() {
	g := v.c.Transports.GDR
	v.check(!slices.Contains(v.c.Transports.Order, TransGDR) || v.c.Secured(),
		"transports.order", TransGDR,
		"leads to other hosts without authentication", "set peer.cluster_key_file to a file made by "+
			"'kvspray keygen cluster', or peer.tls")
	v.check(len(g.Rails) <= maxRails, "transports.gdr.rails", strconv.Itoa(len(g.Rails)),
		"too many rails", fmt.Sprintf("%d at most", maxRails))
	for i, r := range g.Rails {
		key := fmt.Sprintf("transports.gdr.rails[%d]", i)
		v.check(gdrRail.MatchString(r), key, r, "not a port", "write a device, device/port or "+
			"device/port@gid-index: mlx5_0, mlx5_1/2@3")
		v.check(!slices.Contains(g.Rails[:i], r), key, r, "named twice", "keep one")
	}
	v.between("transports.gdr.queue_pairs", g.QueuePairs, 1, maxConnections)
	v.duration("transports.gdr.dead_after", g.DeadAfter, time.Millisecond)
	v.check(g.DeadAfter <= Duration(10*time.Second), "transports.gdr.dead_after", g.DeadAfter.String(),
		"longer than any transfer may wait", "10s at most")
	v.check(slices.Contains([]int{0, 256, 512, 1024, 2048, 4096}, g.MTU), "transports.gdr.mtu",
		strconv.Itoa(g.MTU), "not an MTU of RDMA", "256, 512, 1024, 2048 or 4096")
	v.between("transports.gdr.traffic_class", g.TrafficClass, 0, 255)
	v.between("transports.gdr.service_level", g.ServiceLevel, 0, 15)
}

// gdrRail is the form device[/port][@gid index] of transport/gdr.
var gdrRail = regexp.MustCompile(`^[A-Za-z0-9_.-]+(/[1-9][0-9]{0,2})?(@[0-9]{1,3})?$`)

func (v *checker) transports() {
	t := v.c.Transports
	v.check(len(t.Order) > 0, "transports.order", "", "empty", "name at least one of shm, gdr, tcp")
	for i, name := range t.Order {
		key := fmt.Sprintf("transports.order[%d]", i)
		v.oneOf(key, name, TransSHM, TransGDR, TransTCP)
		v.check(!slices.Contains(t.Order[:i], name), key, name, "named twice", "keep one")
	}
	v.duration("transports.idle", t.Idle, 100*time.Millisecond)
	v.check(len(t.TCP.Rails) <= maxRails, "transports.tcp.rails", strconv.Itoa(len(t.TCP.Rails)),
		"too many rails", fmt.Sprintf("%d at most", maxRails))
	names := map[string]bool{}
	for i, r := range t.TCP.Rails {
		key := fmt.Sprintf("transports.tcp.rails[%d]", i)
		v.between(key+".distance", r.Tier, 0, 3)
		v.check(r.Speed <= 10_000*1e9, key+".speed", r.Speed.String(), "faster than any rail",
			"10000gbit at most")
		if r.Match != "" {
			_, err := path.Match(r.Match, "")
			v.check(err == nil, key+".match", r.Match, "not a pattern", "write an interface's name, with "+
				"* ? or [a-z] where it varies")
			v.check(r.Name == "" && r.Listen == "" && r.Advertise == "", key+".match", r.Match,
				"name, listen or advertise beside it",
				"a pattern stands for many rails: their names and addresses are those of the interfaces")
			continue
		}
		v.check(!r.Exclude, key+".exclude", "true", "an excluded rail without match",
			"remove it, or name interfaces with match")
		v.name(key+".name", r.Name, 32)
		v.check(!names[r.Name], key+".name", r.Name, "two rails have this name", "choose different names")
		names[r.Name] = true
		v.bind(key+".listen", r.Listen, false)
		v.advertise(key, r.Listen, r.Advertise)
	}
	v.gdr()
	v.between("transports.tcp.connections", t.TCP.Connections, 1, maxConnections)
	v.oneOf("transports.tcp.integrity", t.TCP.Integrity, Off, CRC32C, AEAD)
	v.check(t.TCP.Slice >= chunkBytes && t.TCP.Slice <= maxSlice && t.TCP.Slice%chunkBytes == 0,
		"transports.tcp.slice", t.TCP.Slice.String(),
		"not a multiple of 64KiB between 64KiB and 64MiB", "1MiB suits fast rails")
	v.check(t.SHM.Dir == "" || strings.HasPrefix(t.SHM.Dir, "/"), "transports.shm.dir", t.SHM.Dir,
		"not an absolute path", "start it with /")
	v.between("transports.shm.copy_threads", t.SHM.CopyThreads, 0, maxThreads)
	v.oneOf("transports.gpu.enabled", t.GPU.Enabled, Auto, Off)
	v.oneOf("transports.gpu.copy_method", t.GPU.CopyMethod, Auto, "pack", "copy")
	v.check(t.GPU.Table != "", "transports.gpu.calibration", "", "empty", "use auto, off, or a path")
	v.between("transports.gpu.pinned_buffers", t.GPU.Buffers, 8, 4096)
	v.check(t.GPU.Stage >= minStage && t.GPU.Stage <= maxStage && t.GPU.Stage%minStage == 0,
		"transports.gpu.staging_buffer", t.GPU.Stage.String(),
		"not a multiple of 1MiB between 1MiB and 64MiB", "16MiB reaches nine tenths of NVLink, 64MiB a "+
			"little more")
	v.check(t.GPU.Memory >= minGPUMemory && t.GPU.Memory <= maxGPUMemory, "transports.gpu.memory",
		t.GPU.Memory.String(),
		"outside 64MiB to 64GiB", "64MiB is what staging takes; 2GiB have room for three directions "+
			"between two GPUs, and for one within a GPU, too")
	v.gpuNames("transports.gpu.open", t.GPU.Open, t.GPU.Enabled)
	v.gpuNames("transports.gpu.relays", t.GPU.Relays, t.GPU.Enabled)
}

func (v *checker) gpuNames(key string, names []string, enabled string) {
	v.check(len(names) <= maxGPUs, key, strconv.Itoa(len(names)), "too many GPUs",
		fmt.Sprintf("%d at most, or all", maxGPUs))
	for i, name := range names {
		at := fmt.Sprintf("%s[%d]", key, i)
		v.check(gpuName.MatchString(name), at, name, "not a GPU", "write its number, its UUID "+
			"(GPU-...) as nvidia-smi -L prints it, or all")
		v.check(!slices.Contains(names[:i], name), at, name, "named twice", "keep one")
	}
	v.check(len(names) == 0 || enabled != Off, key, strings.Join(names, ","),
		"not used: transports.gpu.enabled is off",
		"remove it, or set transports.gpu.enabled to auto")
}

// gpuName is a GPU as people name it: its number, or the UUID of a GPU or of a part of one (MIG).
var gpuName = regexp.MustCompile(
	`^(all|[0-9]{1,2}|(GPU|MIG)-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})$`)

// checker collects errors with the line of each value.
type checker struct {
	*origin
	c    *Config // nil: a router's
	errs []error
}

func (v *checker) check(ok bool, key, value, wrong, remedy string) {
	if ok {
		return
	}
	e := &Error{Key: key, Value: value, Wrong: wrong, Remedy: remedy}
	if !v.flags[key] {
		e.File, e.Line = v.file, v.line(key)
	}
	v.errs = append(v.errs, e)
}

// line finds the line of a key, or of the section in which it is missing.
func (o *origin) line(key string) int {
	for key != "" {
		if n, ok := o.lines[key]; ok {
			return n
		}
		key = key[:max(strings.LastIndexAny(key, ".["), 0)]
	}
	return 0
}

func (v *checker) between(key string, n, low, high int) {
	v.check(n >= low && n <= high, key, strconv.Itoa(n), fmt.Sprintf("outside %d to %d", low, high),
		"choose a value inside")
}

func (v *checker) size(key string, n, low, high Size) {
	v.check(n >= low && n <= high, key, n.String(), "out of range",
		fmt.Sprintf("use %v to %v", low, high))
}

func (v *checker) duration(key string, d Duration, low time.Duration) {
	v.check(d.D() >= low && d.D() <= maxDuration, key, d.String(), fmt.Sprintf("outside %v to %v", low,
		maxDuration), "choose a value inside")
}

func (v *checker) oneOf(key, value string, allowed ...string) {
	v.check(slices.Contains(allowed, value), key, value, "not one of "+strings.Join(allowed, ", "),
		"choose one of them")
}

func (v *checker) name(key, value string, maxLen int) {
	ok := value != "" && len(value) <= maxLen
	for _, r := range value {
		if r <= ' ' || r > '~' || r == '"' {
			ok = false
		}
	}
	v.check(ok, key, value,
		fmt.Sprintf("not a name of 1 to %d printable ASCII characters without spaces", maxLen),
		"choose another")
}

// bind checks an address to listen on, and that it is permitted without authentication of peers.
func (v *checker) bind(key, addr string, mayBeOff bool) {
	if mayBeOff && addr == Off {
		return
	}
	host, port, err := net.SplitHostPort(addr)
	remedy := "write host:port, for instance 127.0.0.1:0"
	if mayBeOff {
		remedy += ", or off"
	}
	if err != nil {
		v.check(false, key, addr, "not an address", remedy)
		return
	}
	v.port(key, addr, port, true)
	if host != "localhost" && host != "" {
		if _, err := netip.ParseAddr(host); err != nil {
			v.check(false, key, addr, "the host is not an IP address", "name the local address: a name "+
				"may move to another interface")
			return
		}
	}
	v.check(IsLoopback(addr) || v.c.Secured(), key, addr, "reachable from other hosts, but peers "+
		"cannot be authenticated",
		"set peer.cluster_key_file or peer.tls ('kvspray keygen' makes both), or listen on 127.0.0.1")
}

func (v *checker) advertise(section, listen, addr string) {
	if addr != "" {
		v.dialPort(section+".advertise", addr, true)
		return
	}
	host, _, err := net.SplitHostPort(listen)
	if err != nil {
		return // reported by bind
	}
	ip, err := netip.ParseAddr(host)
	wildcard := host == "" || (err == nil && ip.IsUnspecified())
	v.check(!wildcard, section+".advertise", addr, "missing although listen means every address",
		"name the host:port that peers shall dial")
}

func (v *checker) dial(key, addr string) { v.dialPort(key, addr, false) }

func (v *checker) dialPort(key, addr string, zero bool) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil || host == "" {
		v.check(false, key, addr, "not an address that can be dialed", "write host:port")
		return
	}
	if ip, err := netip.ParseAddr(host); err == nil && ip.IsUnspecified() {
		v.check(false, key, addr, "means every address, which cannot be dialed", "name one host")
		return
	}
	v.port(key, addr, port, zero)
}

func (v *checker) port(key, addr, port string, zero bool) {
	n, err := strconv.ParseUint(port, 10, 16)
	low := uint64(1)
	if zero {
		low = 0
	}
	v.check(err == nil && n >= low, key, addr, fmt.Sprintf("port %q is not a number of %d to 65535",
		port, low), "write host:port")
}

// IsLoopback reports whether addr, host:port, is reachable from this host only.
func IsLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.IsLoopback()
}

// minKeyBytes is the smallest cluster key file: 32 bytes in base64 or hex take more.
const minKeyBytes = 32

// CheckFiles checks every file that the configuration names, for 'kvspray config check' and at
// start.
func (c *Config) CheckFiles() error {
	v := checker{origin: &c.origin, c: c}
	if p := c.Peer.ClusterKeyFile; p != "" {
		v.secret("peer.cluster_key_file", p, "make one with 'kvspray keygen cluster'")
	}
	if t := c.Peer.TLS; t.Set() {
		v.secret("peer.tls.key", t.Key, "make one with 'kvspray keygen node'")
		if _, err := tls.LoadX509KeyPair(t.Cert, t.Key); err != nil {
			v.unread("peer.tls.cert", t.Cert, err, "make a pair with 'kvspray keygen node'")
		}
		if _, err := os.Stat(t.CA); err != nil {
			v.unread("peer.tls.ca", t.CA, err, "make one with 'kvspray keygen ca'")
		}
	}
	if p := c.Store.Redis.PasswordFile; p != "" {
		st, err := os.Stat(p)
		if err != nil {
			v.unread("store.redis.password_file", p, err, "write the service's password there")
		} else {
			v.check(st.Mode().IsRegular() && st.Mode().Perm()&0o037 == 0, "store.redis.password_file", p,
				fmt.Sprintf("no file, or open to others (mode %04o)", st.Mode().Perm()), "chmod 600 "+p)
		}
	}
	for _, f := range []struct{ key, path string }{{"trace.transfers", c.Trace.Transfers},
		{"trace.block_hashes", c.Trace.BlockHashes}} {
		if f.path == "" {
			continue
		}
		st, err := os.Stat(filepath.Dir(f.path))
		if err != nil || !st.IsDir() {
			v.check(false, f.key, f.path, "its directory does not exist", "make it, or name another path")
		} else if st, err := os.Stat(f.path); err == nil && st.IsDir() {
			v.check(false, f.key, f.path, "a directory", "name a file in it")
		} else if err := Writable(f.path); err != nil {
			v.check(false, f.key, f.path, "cannot be written: "+err.Error(), "let this user write there, "+
				"or name another path")
		}
	}
	return errors.Join(v.errs...)
}

// unread reports why a file cannot be read. The remedy for an existing but unreadable file is not
// to make it.
func (v *checker) unread(key, path string, err error, remedy string) {
	if errors.Is(err, fs.ErrPermission) {
		remedy = "let this user read it: chown it, or 0440 for a group of the user's"
	}
	v.check(false, key, path, err.Error(), remedy)
}

func (v *checker) secret(key, path, remedy string) {
	st, err := os.Stat(path)
	if err != nil {
		v.unread(key, path, err, remedy)
		return
	}
	v.check(st.Mode().IsRegular() && st.Size() >= minKeyBytes, key, path, "not a key file", remedy)
	v.check(st.Mode().Perm()&0o037 == 0, key, path, fmt.Sprintf("open to others (mode %04o)",
		st.Mode().Perm()), "chmod 600 "+path+", or 0440 where a pod mounts it for its group")
}
