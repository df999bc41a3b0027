package sidecar

import (
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/cluster"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/origin"
)

// served describes the API servers of this node's engines for routers.
type served struct {
	cfg     *config.Engine
	leaving func() bool
	health  func() nodeapi.Health // of the devices
	own     func(netip.Addr) bool // an address is this host's
	started time.Time
	http    string // set before the first description

	problems atomic.Pointer[[]string] // of the last description
	logged   []string                 // problems; of the publisher

	mu    sync.Mutex
	roles map[string]string // that were set, by URL; guarded by mu
}

// of describes the engines that have registered. It leaves out an engine without a valid URL and
// role, and adds the reason to the problems.
func (s *served) of(workers []*engines.Worker) cluster.Serving {
	slices.SortFunc(workers, func(a, b *engines.Worker) int { return strings.Compare(a.Name, b.Name) })
	byURL, why, mute := map[string]*cluster.API{}, map[string]string{}, map[string]string{}
	leases := map[string]int{} // of an engine; each of its ranks has one for a request
	health := s.health()
	for _, w := range workers {
		if w.Internal {
			continue
		}
		name := w.Place.Engine
		if s.cfg.API == "" && w.Engine.API == "" {
			continue // it is for routers with a list, or the leader of its engine is elsewhere
		}
		if slices.Contains(health.Failed, name) {
			why[name] = "a device that it uses has failed"
			continue
		}
		if len(name) > cluster.MaxNameBytes {
			why[name] = fmt.Sprintf("its name has %d bytes, and routers take at most %d: shorten the "+
				"engine's id", len(name), cluster.MaxNameBytes)
			continue
		}
		a, err := s.api(w)
		if err != nil {
			why[name] = err.Error()
			continue
		}
		if err := s.feed(&a, w); err != nil {
			mute[name] = err.Error()
		}
		x := byURL[a.URL]
		if x == nil {
			x = &a
			byURL[a.URL] = x
		}
		if x.Role != a.Role {
			why[name] = fmt.Sprintf("its role is %s, and engine %s has the same URL %s and the role %s: "+
				"name each engine's own URL", a.Role, x.Engine, a.URL, x.Role)
			continue
		}
		if x.Fingerprint == "" {
			x.Fingerprint = a.Fingerprint
		}
		if x.Engine != a.Engine {
			x.Events, x.Replay = "", "" // a router follows one feed of a server
		}
		open, counted := leases[name]
		if !counted {
			x.World += w.Place.World()
		}
		leases[name] = max(open, int(w.Leases.Load()))
		x.Leases += leases[name] - open
		x.Ranks = append(x.Ranks, w.Place.Rank())
	}
	out := cluster.Serving{HTTP: s.http, Leaving: s.leaving() || health.Leaving, Started: s.started}
	for _, u := range slices.Sorted(maps.Keys(byURL)) {
		if len(out.APIs) == cluster.MaxAPIs {
			why[byURL[u].Engine] = fmt.Sprintf("%d URLs are published, and that is the bound: give its "+
				"engines a sidecar of their own", cluster.MaxAPIs)
			continue
		}
		out.APIs = append(out.APIs, *byURL[u])
	}
	var problems []string
	add := func(what string, why map[string]string) {
		for _, name := range slices.Sorted(maps.Keys(why)) {
			shown := name
			if len(name) > cluster.MaxNameBytes {
				shown = name[:cluster.MaxNameBytes/2] + "..."
			}
			problems = append(problems, what+" engine "+shown+": "+why[name])
		}
	}
	add("routers do not find", why)
	add("routers get no KV events of", mute)
	s.problems.Store(&problems)
	return out
}

// log logs each problem when it begins.
func (s *served) log(l *slog.Logger) {
	now := *s.problems.Load()
	for _, text := range now {
		if !slices.Contains(s.logged, text) {
			l.Warn(text)
		}
	}
	s.logged = now
}

// failed lists the URLs whose engines all have a failed device, at most cluster.MaxAPIs.
func (s *served) failed(workers []*engines.Worker, failed []string) (urls []string) {
	works := map[string]bool{}
	for _, w := range workers {
		if a, _ := s.api(w); a.URL != "" && !w.Internal && len(failed) > 0 {
			works[a.URL] = works[a.URL] || !slices.Contains(failed, w.Place.Engine)
		}
	}
	for _, u := range slices.Sorted(maps.Keys(works)) {
		if !works[u] && len(urls) < cluster.MaxAPIs {
			urls = append(urls, u)
		}
	}
	return urls
}

// affected lists the URLs of some engines, at most cluster.MaxAPIs; none: not all have one here.
func (s *served) affected(workers []*engines.Worker, ids []string) (urls []string) {
	for _, w := range workers {
		if w.Internal || !slices.Contains(ids, idOf(w)) {
			continue
		}
		a, _ := s.api(w)
		switch {
		case slices.Contains(urls, a.URL):
		case a.URL == "", len(urls) == cluster.MaxAPIs:
			return nil
		default:
			urls = append(urls, a.URL)
		}
	}
	slices.Sort(urls)
	return urls
}

// api describes the engine of a worker, without ranks.
func (s *served) api(w *engines.Worker) (cluster.API, error) {
	a := cluster.API{URL: s.cfg.API, Role: s.cfg.Role, Engine: w.Place.Engine,
		Version: w.Engine.Version}
	if w.Layout != nil {
		a.Fingerprint = hex.EncodeToString(w.Fingerprint[:])
	}
	if a.URL == "" {
		if err := s.announcedURL(w.Engine.API); err != nil {
			return a, err
		}
		a.URL = w.Engine.API
	}
	s.mu.Lock()
	if set, ok := s.roles[a.URL]; ok {
		a.Role = set
	}
	s.mu.Unlock()
	if a.Role == "" {
		a.Role = w.Engine.Role
	}
	return a, checkRole(a.Role, w.Engine.Role)
}

// feed takes the endpoints of KV events that an engine announces. They are on the host of its URL,
// or of the sidecar.
func (s *served) feed(a *cluster.API, w *engines.Worker) error {
	u, err := url.Parse(a.URL)
	if err != nil {
		return nil // an engine without a URL has none
	}
	at := func(raw string) (string, error) {
		addr, tcp := strings.CutPrefix(raw, "tcp://")
		host, port, err := net.SplitHostPort(addr)
		ip, _ := netip.ParseAddr(host) // a name has none
		switch {
		case raw == "":
			return "", nil
		case !tcp || err != nil:
			return "", fmt.Errorf("its endpoint %q is not tcp://HOST:PORT", raw)
		case host == "*", ip.IsUnspecified():
			host = u.Hostname()
		case host != u.Hostname() && (!ip.IsValid() || !s.own(ip)):
			return "", fmt.Errorf("its endpoint %s is at no address of this host", raw)
		}
		return "tcp://" + net.JoinHostPort(host, port), nil
	}
	events, err := at(w.Engine.Events)
	replay, err2 := at(w.Engine.Replay)
	if err := errors.Join(err, err2); err != nil {
		return err
	}
	if events != "" {
		a.Events, a.Replay = events, replay
	}
	return nil
}

// checkRole compares a role with what an engine announces, which is empty if it announces none.
func checkRole(role, announced string) error {
	known := []string{cluster.RolePrefill, cluster.RoleDecode, cluster.RoleBoth}
	switch {
	case role == "":
		return errors.New("its role is unknown: set engine.role")
	case !slices.Contains(known, role):
		return fmt.Errorf("its role %q is not one of %s", role, strings.Join(known, ", "))
	case announced != "" && announced != cluster.RoleBoth && announced != role:
		return fmt.Errorf("its role is to be %s, and its own (kv_role) is %s: correct engine.role, or "+
			"the engine's setting", role, announced)
	}
	return nil
}

// setRole sets the role of the engines that have a name, an id or a URL, until the sidecar ends.
func (s *served) setRole(workers []*engines.Worker, engine, role string) error {
	var urls, all []string
	for _, w := range workers {
		a, _ := s.api(w) // without a role it can get one
		if w.Internal || a.URL == "" {
			continue
		}
		all = append(all, w.Place.Engine)
		_, id, _ := strings.Cut(w.Place.Engine, "/")
		if engine != w.Place.Engine && engine != id && engine != a.URL {
			continue
		}
		if err := checkRole(role, w.Engine.Role); err != nil {
			return fmt.Errorf("engine %s: %w", w.Place.Engine, err)
		}
		urls = append(urls, a.URL)
	}
	slices.Sort(all)
	all = slices.Compact(all)
	switch {
	case len(all) == 0:
		return errors.New("this sidecar has no engine with a URL: set engine.api")
	case len(urls) == 0:
		return fmt.Errorf("this sidecar has no engine %q: it has %s", engine, strings.Join(all, ", "))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, u := range urls {
		if _, ok := s.roles[u]; !ok && len(s.roles) >= cluster.MaxAPIs {
			return fmt.Errorf("%d roles are set, and that is the bound: restart the sidecar",
				cluster.MaxAPIs)
		}
		s.roles[u] = role
	}
	return nil
}

// announcedURL checks what a process of this host announces: clients' requests go there.
func (s *served) announcedURL(raw string) error {
	u, err := url.Parse(raw)
	if _, perr := origin.Parse(raw); err != nil || perr != nil || u.User != nil {
		return errors.New("the API server that it announces is no URL of a server")
	}
	addr, err := netip.ParseAddr(u.Hostname())
	if err != nil || !s.own(addr) {
		return fmt.Errorf("it announces %s, which is no address of this host: set engine.api", raw)
	}
	return nil
}

// ownAddress reports whether an address is one of this host, or the one that it advertises.
func ownAddress(c *config.Config) func(netip.Addr) bool {
	advertised, _, _ := net.SplitHostPort(c.Peer.Advertise) // none: another form
	return func(a netip.Addr) bool {
		if a.String() == advertised {
			return true
		}
		list, err := net.InterfaceAddrs()
		if err != nil {
			return false
		}
		return slices.ContainsFunc(list, func(x net.Addr) bool {
			n, ok := x.(*net.IPNet)
			if !ok {
				return false
			}
			ip, ok := netip.AddrFromSlice(n.IP)
			return ok && (ip.Unmap() == a.Unmap() || a.IsLoopback() && n.Contains(a.AsSlice()))
		})
	}
}

// servedHTTP is the URL of the HTTP listener for routers; empty: they cannot reach it.
func (n *Node) servedHTTP() string {
	at := n.HTTPAddr()
	host, port, err := net.SplitHostPort(at)
	if err != nil {
		return ""
	}
	peer, _, err := net.SplitHostPort(n.conv.mesh.Endpoint())
	switch ip := net.ParseIP(host); {
	case err != nil, ip == nil:
	case ip.IsUnspecified():
		host = peer
	case ip.IsLoopback() && !config.IsLoopback(net.JoinHostPort(peer, "0")):
		return ""
	}
	return "http://" + net.JoinHostPort(host, port)
}
