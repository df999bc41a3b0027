package proxy

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/origin"
	"github.com/kvspray/kvspray/proxy/internal/zmtp"
)

// maxFound bounds the engines that a router finds.
const maxFound = 256

const roleBoth = "both"

// Found is an engine as a member of the cluster has published it.
type Found struct {
	Engine // Peer is the endpoint of the member, Sidecar its HTTP listener
	Role   string
	// Model is the model's fingerprint; empty: unknown. If engines have one name for two models, the
	// router uses only those with one of the models.
	Model   string
	Member  string   // name of the node, for the operator
	Hosts   []string // addresses of the member itself
	Started time.Time
	ID      string // of the member's process, to order equal entries
	Leaving bool   // it takes no new requests
	Leases  int    // that its sidecar has open for it; -1: unknown
	Lost    bool   // the member has ended, or does not answer to the others
}

// Fleet lists what the members publish. Routers with the same members choose among the same
// engines.
type Fleet interface {
	Found() []Found
	Changed() <-chan struct{} // closed at the next change
}

// discovery makes engines from what members publish. Run owns it.
type discovery struct {
	p     *Proxy
	fleet Fleet
	allow allowed
	wake  chan struct{} // an engine has listed its models, or went down

	taken  []Found             // at the last look
	models map[string][]string // names of an engine's models, by its URL and fingerprint
	noted  map[string]bool     // problems that were logged

	mu              sync.Mutex // guards all below
	prefill, decode []Engine   // of the configuration
}

// list replaces the engines of the configuration.
func (d *discovery) list(prefill, decode []Engine) error {
	if _, err := d.p.join(prefill, decode); err != nil {
		return err
	}
	d.mu.Lock()
	d.prefill, d.decode = prefill, decode
	d.mu.Unlock()
	d.p.found()
	return nil
}

// hosts are those of a URL that a member may publish besides its own.
type hosts struct {
	prefix netip.Prefix
	name   string // or a name; "*.x" stands for all names below x
}

type allowed []hosts

func (a allowed) have(raw string) bool {
	return slices.ContainsFunc(a, func(h hosts) bool { return h.have(hostOf(raw)) })
}

func parseHosts(list []string) (out allowed, err error) {
	for _, text := range list {
		p, perr := netip.ParsePrefix(text)
		if a, aerr := netip.ParseAddr(text); aerr == nil {
			p, perr = netip.PrefixFrom(a, a.BitLen()), nil
		}
		switch {
		case perr == nil:
			out = append(out, hosts{prefix: p.Masked()})
		case text == "" || strings.ContainsAny(text, "/:@ "):
			return nil, fmt.Errorf("proxy: allow %q: not a network, an address or a name; write for "+
				"instance 10.0.0.0/8 or *.engines.svc", text)
		default:
			out = append(out, hosts{name: strings.ToLower(text)})
		}
	}
	return out, nil
}

func (h hosts) have(host string) bool {
	if a, err := netip.ParseAddr(host); err == nil {
		return h.prefix.IsValid() && h.prefix.Contains(a.Unmap())
	}
	if below, ok := strings.CutPrefix(h.name, "*"); ok {
		return strings.HasSuffix(strings.ToLower(host), below)
	}
	return h.name != "" && h.name == strings.ToLower(host)
}

// chosen is the engines of a router out of what members publish, with reasons against the others.
// The order of the argument is of no importance.
func chosen(found []Found, allow allowed) (list []Found, problems []string) {
	reject := func(f *Found, why string, args ...any) {
		problems = append(problems, fmt.Sprintf("engine %s of %s: ", shown(f.URL), f.Member)+
			fmt.Sprintf(why, args...))
	}
	found = slices.DeleteFunc(slices.Clone(found), func(f Found) bool {
		u, err := url.Parse(f.URL)
		_, oerr := origin.Parse(f.URL)
		wrong := err != nil || oerr != nil || u.User != nil
		if wrong {
			reject(&f, "its URL is not one of a server")
		}
		return wrong
	})
	for i := range found {
		at, _ := origin.Parse(found[i].URL) // it was checked
		found[i].URL = at.String()          // two spellings are one engine
	}
	rank := func(f *Found) int { // of two with one URL
		switch {
		case f.Lost:
			return 2
		case !f.ownHost():
			return 1
		}
		return 0
	}
	slices.SortFunc(found, func(a, b Found) int {
		return cmp.Or(cmp.Compare(a.URL, b.URL), cmp.Compare(rank(&a), rank(&b)),
			b.Started.Compare(a.Started), cmp.Compare(a.ID, b.ID), cmp.Compare(a.Role, b.Role))
	})
	for _, f := range found {
		switch {
		case f.Role != rolePrefill && f.Role != roleDecode && f.Role != roleBoth:
			reject(&f, "its role %q is not one of prefill, decode, both", f.Role)
		case !f.ownHost() && !allow.have(f.URL):
			reject(&f, "it is on another host than that member: add this host to allow if the member "+
				"may publish it")
		case len(list) > 0 && list[len(list)-1].URL == f.URL:
			// Two sidecars publish one URL after a restart, or if an engine has ranks on several nodes.
			if x := &list[len(list)-1]; x.Role != f.Role && !f.Lost {
				reject(&f, "%s publishes the same URL with the role %s, and this one %s: the router uses "+
					"the first one", x.Member, x.Role, f.Role)
			}
		case len(list) == maxFound:
			reject(&f, "the router takes at most %d engines", maxFound)
		default:
			list = append(list, f)
		}
	}
	return list, problems
}

// ownHost reports whether an engine is on the host of its member.
func (f *Found) ownHost() bool { return f.owns(f.URL) }

func (f *Found) owns(raw string) bool {
	a, err := netip.ParseAddr(hostOf(raw))
	return err == nil && slices.ContainsFunc(f.Hosts, func(h string) bool {
		b, err := netip.ParseAddr(h)
		return err == nil && a.Unmap() == b.Unmap()
	})
}

// hostPortOf is the address that a URL leads to; empty: it has none.
func hostPortOf(raw string) string {
	u, err := url.Parse(raw)
	if err != nil || u.Hostname() == "" {
		return ""
	}
	port := map[string]string{"http": "80", "https": "443"}[u.Scheme]
	return net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), port))
}

// hostOf is the host of a URL; empty: it has none.
func hostOf(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return ""
	}
	return u.Hostname()
}

// shown is a URL for the operator.
func shown(raw string) string {
	if u, err := url.Parse(raw); err == nil && u.Host != "" {
		return u.Scheme + "://" + u.Host
	}
	return fmt.Sprintf("%q", raw)
}

// unlike lists the engines, by their index, that serve another model than most engines with the
// same model name. names has the model names of each engine; none: they are unknown.
func unlike(list []Found, names [][]string) map[int]string {
	votes := map[string]map[string]int{} // by the name, by the fingerprint
	for i, f := range list {
		for _, name := range names[i] {
			if f.Model != "" {
				if votes[name] == nil {
					votes[name] = map[string]int{}
				}
				votes[name][f.Model]++
			}
		}
	}
	out := map[int]string{}
	for i, f := range list {
		for _, name := range names[i] {
			top := f.Model
			for model, n := range votes[name] {
				if v := votes[name][top]; n > v || n == v && model < top {
					top = model
				}
			}
			if f.Model != "" && top != f.Model {
				out[i] = name
			}
		}
	}
	return out
}

// run follows the fleet until ctx ends.
func (d *discovery) run(ctx context.Context) {
	tick := time.NewTicker(d.p.times.Check)
	defer tick.Stop()
	for {
		changed := d.fleet.Changed()
		d.look()
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-d.wake:
		case <-tick.C:
		}
	}
}

// look updates the router's engines to those that the fleet has now.
func (d *discovery) look() {
	list, problems := chosen(d.fleet.Found(), d.allow)
	list = slices.DeleteFunc(list, func(f Found) bool {
		return f.Leaving || f.Lost && !d.lives(f.URL)
	})
	for i := range list {
		if list[i].Lost {
			list[i].Role = roleDecode // without its sidecar it cannot send caches
		}
	}
	names, models := make([][]string, len(list)), map[string][]string{}
	for i, f := range list {
		key := f.URL + " " + f.Model
		models[key] = d.modelsOf(&f)
		if models[key] == nil {
			models[key] = d.models[key]
		}
		names[i] = models[key]
	}
	d.models = models
	out := unlike(list, names)
	for _, i := range slices.Sorted(maps.Keys(out)) {
		problems = append(problems, fmt.Sprintf("engine %s of %s: it serves another model than most "+
			"engines with the name %q: give its model another name", shown(list[i].URL), list[i].Member,
			out[i]))
	}
	d.mu.Lock()
	prefill, decode := slices.Clone(d.prefill), slices.Clone(d.decode)
	d.mu.Unlock()
	taken := map[string]bool{}
	for _, e := range slices.Concat(prefill, decode) {
		u, _ := origin.Parse(e.URL) // it was checked
		taken[u.String()] = true
	}
	var now []Found
	for i, f := range list {
		if _, is := out[i]; is || taken[f.URL] {
			continue
		}
		f.found = true
		if err := d.feed(&f); err != nil {
			problems = append(problems, fmt.Sprintf("engine %s of %s: %v", shown(f.URL), f.Member, err))
		}
		_, err := d.p.newBackend(rolePrefill, f.Engine)
		if err != nil {
			problems = append(problems, err.Error())
			continue
		}
		now = append(now, f)
		if f.Role != roleDecode {
			prefill = append(prefill, f.Engine)
		}
		if f.Role != rolePrefill {
			f.Peer = ""
			decode = append(decode, f.Engine)
		}
	}
	err := d.p.setEngines(prefill, decode)
	if err != nil {
		problems = append([]string{err.Error()}, problems...)
	}
	d.note(problems)
	if err != nil {
		return
	}
	d.report(now)
	d.load(now)
	d.approve(list, names)
}

// feed checks where an engine publishes KV events. It clears the endpoints if no policy uses them,
// or if the engine may not name their host.
func (d *discovery) feed(f *Found) error {
	events, replay := f.Events, f.Replay
	f.Events, f.Replay = "", ""
	if d.p.placing == nil || events == "" {
		return nil
	}
	for _, text := range []string{events, replay} {
		if text == "" {
			continue
		}
		_, addr, err := zmtp.ParseEndpoint(text)
		u := "http://" + addr
		if err != nil || hostOf(u) != hostOf(f.URL) && !f.owns(u) && !d.allow.have(u) {
			return fmt.Errorf("its KV events are ignored: %q is not tcp://HOST:PORT on the host of its "+
				"URL: add the host to allow if the member may publish it", text)
		}
	}
	f.Events, f.Replay = events, replay
	return nil
}

// lives reports whether an engine that is in use answers.
func (d *discovery) lives(url string) bool {
	return slices.ContainsFunc(d.p.decode.list(), func(b *backend) bool {
		return b.url.String() == url && b.condition() < silent
	})
}

// modelsOf are the names that an engine in use has listed; nil: unknown.
func (d *discovery) modelsOf(f *Found) []string {
	for _, b := range d.p.backends() {
		if b.url.String() != f.URL {
			continue
		}
		b.mu.Lock()
		names := slices.Sorted(maps.Keys(b.models.cards))
		names = slices.DeleteFunc(names, func(n string) bool { return b.models.adapters[n] })
		b.mu.Unlock()
		if len(names) > 0 {
			return names
		}
	}
	return nil
}

// approve permits requests to engines whose models are known and consistent.
func (d *discovery) approve(list []Found, names [][]string) {
	for i, f := range list {
		if len(names[i]) == 0 {
			continue
		}
		for _, b := range d.p.backends() {
			if b.url.String() == f.URL {
				b.mu.Lock()
				b.waits = b.waits && b.models.cards == nil
				b.mu.Unlock()
			}
		}
	}
}

// load notes the numbers of leases that the sidecars of engines have published.
func (d *discovery) load(now []Found) {
	by := map[string]int{}
	for _, f := range now {
		if !f.Lost { // its last number is out of date
			by[f.URL] = f.Leases
		}
	}
	for _, b := range d.p.backends() {
		leases, ok := by[b.url.String()]
		if !ok {
			leases = -1
		}
		b.mu.Lock()
		b.leases = leases
		b.mu.Unlock()
	}
}

// note logs each problem when it begins.
func (d *discovery) note(problems []string) {
	now := map[string]bool{}
	for _, text := range problems[:min(len(problems), maxFound)] {
		if now[text] = true; !d.noted[text] {
			d.p.log.Warn("an engine of the membership gets no requests", "err", text)
		}
	}
	d.noted = now
}

// report logs engines that come and go.
func (d *discovery) report(now []Found) {
	same := func(a *Found) func(Found) bool {
		return func(b Found) bool { return a.URL == b.URL && a.Role == b.Role }
	}
	for _, f := range now {
		if !slices.ContainsFunc(d.taken, same(&f)) {
			d.p.log.Info("engine found", "url", shown(f.URL), "role", f.Role, "member", f.Member)
		}
	}
	for _, f := range d.taken {
		if !slices.ContainsFunc(now, same(&f)) {
			d.p.log.Info("engine left out", "url", shown(f.URL), "role", f.Role, "member", f.Member)
		}
	}
	d.taken = now
}

// found wakes the discovery after an engine has listed its models, or went down.
func (p *Proxy) found() {
	if p.discovery == nil {
		return
	}
	select {
	case p.discovery.wake <- struct{}{}:
	default:
	}
}
