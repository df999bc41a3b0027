// Package fleet has a test of many processes: sidecars, routers that find engines by gossip, and
// fake engines that come, go and die under load.
package fleet

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/internal/ui/cli"
)

// What this test binary is instead of a test, in its environment.
const (
	asKvspray = "KVSPRAY_TEST_COMMAND" // kvspray with the arguments of the process
	asEngine  = "KVSPRAY_TEST_ENGINE"  // an engine with this configuration
)

func TestMain(m *testing.M) {
	if slices.Contains(os.Environ(), ownSysfs) {
		if err := unix.Mount("sysfs", "/sys", "sysfs", unix.MS_RDONLY, ""); err != nil {
			fmt.Fprintln(os.Stderr, "sysfs:", err)
			os.Exit(1)
		}
	}
	if os.Getenv(asKvspray) != "" {
		os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr))
	}
	if text := os.Getenv(asEngine); text != "" {
		var c engineConfig
		err := json.Unmarshal([]byte(text), &c)
		if err == nil {
			err = runEngine(&c)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

const (
	nodes    = 4
	perNode  = 2 // engines
	routers  = 3
	clients  = 4
	patience = 2 * time.Minute
	idleFor  = 30 * time.Second // before the load of a soak
)

// process is a child that a test can kill.
type process struct {
	t    *testing.T
	name string
	log  string
	argv []string
	env  []string
	cmd  *exec.Cmd
}

func (p *process) start() {
	p.t.Helper()
	p.cmd = exec.Command(os.Args[0], p.argv...)
	p.cmd.Env = append(os.Environ(), p.env...)
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer func() { _ = log.Close() }() // the child has its own
	p.cmd.Stderr = log
	if slices.Contains(p.env, ownSysfs) {
		p.cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	}
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
}

// end sends a signal and waits for the end.
func (p *process) end(s syscall.Signal) {
	if p.cmd == nil {
		return
	}
	_ = p.cmd.Process.Signal(s) // it may have ended by itself
	_ = p.cmd.Wait()
	p.cmd = nil
}

// newProcess is a child that has not started.
func newProcess(t *testing.T, dir, name, env string, argv ...string) *process {
	p := &process{t: t, name: name, log: filepath.Join(dir, name+".log"), argv: argv,
		env: []string{env}}
	t.Cleanup(func() {
		p.end(syscall.SIGKILL)
		if log, err := os.ReadFile(p.log); err == nil && t.Failed() {
			t.Logf("the log of %s:\n%s", name, log[max(0, len(log)-3000):])
		}
	})
	return p
}

// node is a sidecar with its engines.
type node struct {
	sidecar *process
	socket  string
	http    string
	gpus    string // directory of their state; empty: it has none
	engines []*engine
}

type engine struct {
	*process
	config engineConfig
	role   string // now
	up     bool
}

func (e *engine) url() string { return "http://" + e.config.Listen }

// begin starts an engine that needs some time before it answers.
func (e *engine) begin() {
	e.up = true
	e.role = e.config.Role
	b, err := json.Marshal(e.config)
	if err != nil {
		e.t.Fatal(err)
	}
	e.env = []string{asEngine + "=" + string(b)}
	e.start()
}

func (e *engine) stats() (s stats) {
	_ = getJSON(e.url()+"/stats", &s) // it may be dead
	return s
}

type router struct {
	*process
	ready string
	url   atomic.Pointer[string] // nil: it is dead
}

// begin starts a router, and returns once it is ready for clients. Before the first engine has come
// that never happens.
func (r *router) begin() {
	_ = os.Remove(r.ready)
	r.start()
	var at struct{ HTTP string }
	until(r.t, r.name+" listens", func() bool {
		b, err := os.ReadFile(r.ready)
		return err == nil && json.Unmarshal(b, &at) == nil
	})
	url := "http://" + at.HTTP
	until(r.t, r.name+" is ready", func() bool { return getJSON(url+"/health", &struct{}{}) == nil })
	r.url.Store(&url)
}

// takes lists the engines that get requests of a router, with their roles.
func (r *router) takes() (list []string) {
	url := r.url.Load()
	if url == nil {
		return nil
	}
	var h struct {
		Backends []struct {
			Role, URL, Condition string
			Leaving              bool
		}
	}
	if getJSON(*url+"/health", &h) != nil {
		return nil
	}
	for _, b := range h.Backends {
		if b.Condition == "fit" && !b.Leaving {
			list = append(list, b.URL+" "+b.Role)
		}
	}
	slices.Sort(list)
	return list
}

var client = &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
	MaxIdleConnsPerHost: 2 * clients}}

func getJSON(url string, into any) error {
	resp, err := client.Get(url)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	testutil.Eventually(t, patience, what, ok)
}

type fleet struct {
	t       *testing.T
	nodes   []*node
	routers []*router
	dir     string

	served, broken atomic.Int64
}

// firstPort is below those that the kernel gives to connections and to listeners without a port: a
// process that starts late finds its own ports free.
const firstPort = 7000

// addresses are those of a node, on a host that is this test's alone.
func addresses(host string, node, n int) (list []string) {
	for i := range n {
		list = append(list, net.JoinHostPort(host, strconv.Itoa(firstPort+node*n+i)))
	}
	return list
}

func newFleet(t *testing.T) *fleet {
	f := &fleet{t: t, dir: testutil.ShortDir(t)}
	host := testutil.Loopback()
	var gossip []string
	for i := range nodes {
		at := addresses(host, i, 3+perNode)
		gossip = append(gossip, at[2])
		n := &node{socket: filepath.Join(f.dir, fmt.Sprintf("s%d", i)), http: at[1]}
		n.sidecar = newProcess(t, f.dir, fmt.Sprintf("sidecar%d", i), asKvspray+"=1", "serve",
			"--socket", n.socket, "--listen", at[0], "--http", at[1], "--set", fmt.Sprintf("node=n%d", i),
			"--set", "peer.gossip.listen="+at[2], "--set", "peer.gossip.join="+gossip[max(0, i-1)]+","+
				gossip[0], "--set", "transports.order=tcp")
		for j := range perNode {
			role := []string{"both", "decode", "both", "prefill"}[(perNode*i+j)%4]
			e := &engine{config: engineConfig{Socket: n.socket, Listen: at[3+j],
				ID: fmt.Sprintf("e%d-%d", i, j), Role: role, Loads: 200 * time.Millisecond}}
			e.process = newProcess(t, f.dir, e.config.ID, "")
			n.engines = append(n.engines, e)
		}
		f.nodes = append(f.nodes, n)
	}
	for i := range routers {
		r := &router{ready: filepath.Join(f.dir, fmt.Sprintf("r%d", i))}
		r.process = newProcess(t, f.dir, fmt.Sprintf("router%d", i), asKvspray+"=1", "proxy", "--join",
			gossip[i%nodes]+","+gossip[(i+1)%nodes], "--listen", net.JoinHostPort(host, "0"),
			"--ready-file", r.ready)
		f.routers = append(f.routers, r)
	}
	return f
}

func (f *fleet) engines() (list []*engine) {
	for _, n := range f.nodes {
		list = append(list, n.engines...)
	}
	return list
}

// agree waits until all routers that live send requests to the engines that live, and no others.
func (f *fleet) agree(what string) {
	f.t.Helper()
	var want []string
	for _, e := range f.engines() {
		if !e.up {
			continue
		}
		for _, role := range []string{"prefill", "decode"} {
			if e.role == role || e.role == "both" {
				want = append(want, e.url()+" "+role)
			}
		}
	}
	slices.Sort(want)
	var got []string
	defer func() {
		if f.t.Failed() {
			f.t.Logf("%s: %v; want %v", what, got, want)
		}
	}()
	until(f.t, what, func() bool {
		for _, r := range f.routers {
			if got = r.takes(); r.url.Load() != nil && !slices.Equal(got, want) {
				return false
			}
		}
		return true
	})
}

// resume starts a sidecar again, and waits until its engines have returned to it.
func (f *fleet) resume(n *node) {
	f.t.Helper()
	n.sidecar.start()
	up := 0
	for _, e := range n.engines {
		if e.up {
			up++
		}
	}
	until(f.t, "the engines return to their sidecar", func() bool {
		var at struct{ Workers []string }
		return getJSON("http://"+n.http+"/v1/node", &at) == nil && len(at.Workers) == up
	})
}

// prefills reports whether a router sends prompts to engines of a node: not once gossip has lost
// their sidecar.
func (f *fleet) prefills(n *node) bool {
	return slices.ContainsFunc(f.routers, func(r *router) bool {
		return slices.ContainsFunc(r.takes(), func(x string) bool {
			return slices.ContainsFunc(n.engines, func(e *engine) bool { return x == e.url()+" prefill" })
		})
	})
}

// idle logs what processes cost without requests.
func (f *fleet) idle(lasts time.Duration) {
	f.t.Helper()
	before, at := map[*process]time.Duration{}, time.Now()
	var all []*process
	for _, n := range f.nodes {
		all = append(all, n.sidecar)
	}
	for _, r := range f.routers {
		all = append(all, r.process)
	}
	for _, p := range all {
		before[p] = p.onCPU()
	}
	<-time.After(lasts)
	for _, p := range all {
		used := float64(p.onCPU()-before[p]) / float64(time.Since(at)) * 100
		f.t.Logf("%s, idle for %v: %.2f%% of a core, %s", p.name, lasts, used, p.memory())
	}
}

// onCPU is the CPU time of a process, by the scheduler's statistics of its threads.
func (p *process) onCPU() (sum time.Duration) {
	p.t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", p.cmd.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	for _, path := range threads {
		var ns int64
		if b, err := os.ReadFile(path); err == nil { // the thread may have ended
			_, _ = fmt.Sscan(string(b), &ns)
		}
		sum += time.Duration(ns)
	}
	return sum
}

// memory is the resident memory of a process, as the kernel reports it.
func (p *process) memory() string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			return strings.TrimSpace(rest)
		}
	}
	return "unknown memory"
}

// load sends requests to all routers until ctx ends.
func (f *fleet) load(ctx context.Context) {
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			tick := time.NewTicker(2 * time.Millisecond) // the processes share few cores
			defer tick.Stop()
			for n := c; ctx.Err() == nil; n++ {
				f.request(f.routers[n%routers])
				<-tick.C
			}
		})
	}
	wg.Wait()
}

func (f *fleet) request(r *router) {
	url := r.url.Load()
	if url == nil {
		return
	}
	resp, err := client.Post(*url+"/v1/completions", "application/json",
		strings.NewReader(`{"model":"m","prompt":"hi","max_tokens":4}`))
	if err != nil {
		if r.url.Load() == url {
			f.t.Errorf("%s: no answer: %v", r.name, err)
		}
		return
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	switch {
	case err != nil: // it had begun
		f.broken.Add(1)
	case resp.StatusCode != http.StatusOK && r.url.Load() == url:
		f.t.Errorf("%s: %d %s", r.name, resp.StatusCode, body)
	case bytes.Contains(body, []byte("choices")):
		f.served.Add(1)
	}
}

// set sets the role of an engine by the command.
func (f *fleet) set(n *node, e *engine, role string) {
	f.t.Helper()
	p := newProcess(f.t, f.dir, "role", asKvspray+"=1", "role", "set", e.url(), role, "--socket",
		n.socket)
	p.start()
	if err := p.cmd.Wait(); err != nil {
		f.t.Error("kvspray role set: ", err)
	}
	p.cmd = nil
}

// leave sets the mark of a drain at a node's sidecar.
func (n *node) leave(method string) error {
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", n.socket+".admin")
		}}}
	req, err := http.NewRequest(method, "http://admin/v1/leave", nil)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// soakFor is how long processes come, go and die after each has done so once.
// KVSPRAY_FLEET_SOAK=20m makes it longer, and bounds the times in which routers notice.
func soakFor(t *testing.T) time.Duration {
	text := os.Getenv("KVSPRAY_FLEET_SOAK")
	if text == "" {
		return 0
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal("KVSPRAY_FLEET_SOAK: ", err)
	}
	return d
}

// begin starts the sidecars, some engines and the routers.
func (f *fleet) begin(engines int) {
	f.t.Helper()
	for _, n := range f.nodes {
		n.sidecar.start()
	}
	for _, e := range f.engines()[:engines] {
		e.begin()
	}
	for _, r := range f.routers {
		r.begin()
	}
	f.agree("the first engines")
}

// serve begins the load. The returned function ends it.
func (f *fleet) serve() (end func()) {
	ctx, stop := context.WithCancel(f.t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { f.load(ctx) })
	return func() {
		stop()
		wg.Wait()
		f.t.Logf("%d requests served, %d begun answers broke", f.served.Load(), f.broken.Load())
	}
}

// turn takes turns until each was taken and the time of a soak is over.
func (f *fleet) turn(soak time.Duration, each int, take func(n int)) {
	end := time.Now().Add(soak)
	for n := 0; (n < each || time.Now().Before(end)) && !f.t.Failed(); n++ {
		take(n)
	}
}

// progress waits until clients have got answers.
func (f *fleet) progress(what string) {
	f.t.Helper()
	from := f.served.Load()
	until(f.t, what+": requests are served", func() bool { return f.served.Load() >= from+50 })
}

// within logs how long routers took to notice something, and bounds it in a soak.
func (f *fleet) within(what string, took, limit time.Duration) {
	f.t.Helper()
	f.t.Logf("%s: %v", what, took.Round(time.Millisecond))
	if soakFor(f.t) > 0 && took > limit {
		f.t.Errorf("%s: %v, and %v is the bound", what, took, limit)
	}
}

// Engines, sidecars and routers start, end and are killed under load. No client sees an error,
// unless its answer had begun, and all routers send to the same engines.
func TestFleet(t *testing.T) {
	f := newFleet(t)
	soak := soakFor(t)
	f.begin(nodes*perNode - 1)
	if soak > 0 {
		f.idle(idleFor)
	}
	defer f.serve()()
	back := func(e *engine, what string) {
		t.Helper()
		e.begin()
		f.agree(what)
		until(t, what+": it gets requests", func() bool { return e.stats().Requests > 0 })
		s := e.stats()
		f.within(what+", from its first good health check to its first request", s.First.Sub(s.Healthy),
			2*time.Second)
	}
	turns := []func(n *node, e *engine, r *router){
		func(_ *node, e *engine, _ *router) { // scale up, and the engine's process is killed
			if !e.up {
				back(e, "an engine comes")
			}
			begun := time.Now()
			e.up = false
			e.end(syscall.SIGKILL)
			f.agree("a killed engine is left out")
			f.within("a killed engine is left out", time.Since(begun), time.Second)
			f.progress("a killed engine")
			back(e, "the killed engine is back")
		},
		func(n *node, _ *engine, _ *router) { // scale down, and up again
			if err := n.leave(http.MethodPost); err != nil {
				t.Fatal(err)
			}
			asked := time.Now()
			for _, e := range n.engines {
				e.up = false
			}
			f.agree("a node that drains gets nothing")
			f.within("a node that drains gets nothing", time.Since(asked), time.Second)
			for _, e := range n.engines {
				if s := e.stats(); s.Last.After(asked) {
					f.within("the last request after a drain has begun", s.Last.Sub(asked), time.Second)
				}
				e.end(syscall.SIGTERM)
			}
			f.progress("a drained node")
			if err := n.leave(http.MethodDelete); err != nil {
				t.Fatal(err)
			}
			for _, e := range n.engines {
				back(e, "the node is back")
			}
		},
		func(n *node, _ *engine, _ *router) { // a whole node is lost
			lost := time.Now()
			n.sidecar.end(syscall.SIGKILL)
			for _, e := range n.engines {
				e.up = false
				e.end(syscall.SIGKILL)
			}
			f.agree("a lost node is left out")
			f.within("a lost node is left out", time.Since(lost), 10*time.Second)
			f.progress("a lost node")
			n.sidecar.start()
			for _, e := range n.engines {
				back(e, "the lost node is back")
			}
		},
		func(n *node, _ *engine, _ *router) { // a sidecar restarts, its engines live
			killed := time.Now()
			n.sidecar.end(syscall.SIGKILL)
			f.progress("a killed sidecar")
			if soak > 0 {
				until(t, "gossip notices a killed sidecar", func() bool { return !f.prefills(n) })
				f.within("gossip notices a killed sidecar", time.Since(killed), 10*time.Second)
			}
			f.resume(n)
			f.agree("the sidecar is back")
		},
		func(n *node, _ *engine, _ *router) { // the same in order
			n.sidecar.end(syscall.SIGTERM)
			f.progress("a sidecar that ended")
			f.resume(n)
			f.agree("the sidecar that ended is back")
		},
		func(n *node, _ *engine, _ *router) { // roles change while it runs
			i := slices.IndexFunc(n.engines, func(e *engine) bool { return e.config.Role == "both" })
			e := n.engines[i]
			for _, role := range []string{"decode", "prefill", "both"} {
				set := time.Now()
				f.set(n, e, role)
				e.role = role
				f.agree(role)
				f.within("a role is "+role, time.Since(set), time.Second)
				f.progress(role)
			}
		},
		func(_ *node, _ *engine, r *router) { // a router is killed
			r.url.Store(nil)
			r.end(syscall.SIGKILL)
			f.progress("a killed router")
			r.begin()
			f.agree("the router is back")
		},
	}
	f.turn(soak, len(turns), func(n int) {
		at := f.nodes[(nodes-1+n)%nodes]
		if n >= len(turns) {
			at = f.nodes[rand.N(nodes)]
		}
		turns[n%len(turns)](at, at.engines[len(at.engines)-1-n/len(turns)%perNode],
			f.routers[n%routers])
	})
}
