package sidecar

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/testutil"
)

// How large the mesh of processes is; a few processes and seconds where nothing is set.
const (
	meshProcessesEnv = "KVSPRAY_MESH"         // sidecars
	meshSecondsEnv   = "KVSPRAY_MESH_SECONDS" // of churn
	meshRateEnv      = "KVSPRAY_MESH_RATE"    // restarts a second
	meshPatience     = 2 * time.Minute        // until all have met, and meshEach for each of them
	meshEach         = 6 * time.Second
)

func fromEnv(t *testing.T, name string, otherwise int) int {
	s := os.Getenv(name)
	if s == "" {
		return otherwise
	}
	n, err := strconv.Atoi(s)
	ok(t, err)
	return n
}

// meshed is a sidecar process in a mesh.
type meshed struct {
	*process
	log string
}

// fixedPorts hands out addresses below the ports that the kernel gives to outgoing connections. A
// large mesh has many of those: one may take a port that was free a moment ago.
type fixedPorts struct{ last atomic.Int64 }

const lowestPort = 10240 // below are ports of well-known services

func (p *fixedPorts) next(t *testing.T) string {
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	ok(t, err)
	end, err := strconv.Atoi(strings.Fields(string(b))[0])
	ok(t, err)
	if end <= lowestPort {
		end = 1 << 16
	}
	for range end - lowestPort {
		at := net.JoinHostPort(testutil.Loopback(),
			strconv.Itoa(lowestPort+int(p.last.Add(1))%(end-lowestPort)))
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", at)
		if err == nil {
			ok(t, l.Close())
			return at
		}
	}
	t.Fatalf("every port from %d to %d is taken", lowestPort, end-1)
	return ""
}

// newMeshed starts a sidecar that joins others by gossip alone.
func newMeshed(t *testing.T, ports *fixedPorts, gossip, join, secret string) *meshed {
	dir := testutil.ShortDir(t)
	p := &process{t: t, path: filepath.Join(dir, "config.yaml"), socket: filepath.Join(dir, "s.sock"),
		endpoint: ports.next(t), http: ports.next(t)}
	if gossip == "" {
		gossip = ports.next(t) // not the kernel's choice: that may soon be a data lane's of another
	}
	b, err := json.Marshal(map[string]any{"node": filepath.Base(dir),
		"engine": map[string]any{"socket": p.socket},
		"peer": map[string]any{"listen": p.endpoint, "cluster_key_file": secret,
			"gossip": map[string]any{"listen": gossip, "join": []string{join}}},
		"http": map[string]any{"listen": p.http}})
	ok(t, err)
	ok(t, os.WriteFile(p.path, b, 0o600))
	t.Cleanup(p.kill)
	p.start()
	return &meshed{p, p.path + ".log"}
}

// reach is what it reports of its peers, or an error where it does not answer.
func (m *meshed) reach() (v nodeapi.Reach, err error) {
	resp, err := http.Get("http://" + m.http + "/v1/reach")
	if err != nil {
		return v, err
	}
	defer func() { _ = resp.Body.Close() }()
	return v, json.NewDecoder(resp.Body).Decode(&v)
}

// peers is the number of its peers and of its data lanes; -1 where it does not answer.
func (m *meshed) peers() (known, lanes int) {
	v, err := m.reach()
	if err != nil {
		return -1, 0
	}
	for _, p := range v.Peers {
		for _, x := range p.Pairs {
			lanes += x.Lanes
		}
	}
	return len(v.Peers), lanes
}

// strangers are those of its peers that are not among all.
func (m *meshed) strangers(all []*meshed) (names []string) {
	v, _ := m.reach()
	for _, p := range v.Peers {
		if !slices.ContainsFunc(all, func(o *meshed) bool { return o.node() == p.Node }) {
			names = append(names, p.Node)
		}
	}
	return names
}

func (m *meshed) node() string { return filepath.Base(filepath.Dir(m.path)) }

// costs are the descriptors and the resident bytes of a process.
func (m *meshed) costs(t *testing.T) (fds int, rss int64) {
	pid := m.cmd.Process.Pid
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	ok(t, err)
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	ok(t, err)
	pages, err := strconv.ParseInt(strings.Fields(string(b))[1], 10, 64)
	ok(t, err)
	return len(all), pages * int64(os.Getpagesize())
}

// refusal is whether a line of a log refuses a member. Nothing listens any more where one was
// killed, and the one at the other end of a lane may be killed before it has sent a Hello.
func refusal(line string) bool {
	return strings.Contains(line, "refused") &&
		!strings.Contains(line, syscall.ECONNREFUSED.Error()) &&
		!strings.Contains(line, "read hello: EOF") &&
		!strings.Contains(line, "read hello: "+syscall.ECONNRESET.Error())
}

// churn replaces members at a rate per second, every other one without a warning, and returns the
// logs of those that ended. Several are replaced at a time, because one takes long to start beside
// many others.
func churn(t *testing.T, members []*meshed, rate int, length time.Duration,
	next func() *meshed) (logs []string, ended int) {
	began := time.Now()
	workers := min(rate, len(members))
	var mu sync.Mutex
	var wait sync.WaitGroup
	for w := range workers {
		wait.Go(func() {
			for n := 0; time.Since(began) < length; n++ {
				own := (len(members) - w + workers - 1) / workers // members w, w+workers, ...
				m := &members[w+workers*rand.IntN(own)]
				if n%2 == 0 {
					(*m).signal(syscall.SIGTERM)
					_ = (*m).cmd.Wait() // it drains nothing
					(*m).cmd = nil
				} else {
					(*m).kill()
				}
				mu.Lock()
				logs, ended = append(logs, (*m).log), ended+1
				mu.Unlock()
				*m = next()
				at := time.Duration(n+1)*time.Duration(workers) + time.Duration(w)
				<-time.After(time.Until(began.Add(at * time.Second / time.Duration(rate))))
			}
		})
	}
	wait.Wait()
	return logs, ended
}

// Sidecars in processes of their own meet by gossip, while others of them end, one way or the
// other, and new ones come. None is refused, and what the others cost is afterwards what it was
// before. make test-mesh runs it with 200 of them for five minutes.
func TestMeshOfProcesses(t *testing.T) {
	count, seconds, rate := fromEnv(t, meshProcessesEnv, 8), fromEnv(t, meshSecondsEnv, 4),
		fromEnv(t, meshRateEnv, 2)
	key, err := keys.NewCluster()
	ok(t, err)
	secret := filepath.Join(t.TempDir(), "cluster.key")
	ok(t, keys.WriteCluster(secret, key))
	var ports fixedPorts
	ports.last.Store(rand.Int64N(1 << 16)) // another test may run beside this one
	seed := ports.next(t)
	var all []*meshed
	for i := range count {
		at := ""
		if i == 0 {
			at = seed
		}
		all = append(all, newMeshed(t, &ports, at, seed, secret))
	}
	whole := func(what string) {
		t.Helper()
		began := time.Now()
		complete := func(m *meshed) bool {
			known, lanes := m.peers()
			return known == count-1 && lanes == 0
		}
		left := slices.Clone(all)
		logged := began
		for {
			// Only those that were not whole are asked again, as the answers cost what is measured.
			if left = slices.DeleteFunc(left, complete); len(left) == 0 {
				if left = slices.DeleteFunc(slices.Clone(all), complete); len(left) == 0 {
					t.Logf("%s: whole after %v", what, time.Since(began).Round(time.Millisecond))
					return
				}
			}
			if time.Since(logged) > 10*time.Second {
				logged = time.Now()
				known, lanes := left[0].peers()
				t.Logf("%s: %d of %d are not whole after %v; the first of them has %d peers, of which %v are "+
					"gone, and has %d lanes", what, len(left), count, time.Since(began).Round(time.Second), known,
					left[0].strangers(all), lanes)
			}
			if time.Since(began) > meshPatience+time.Duration(count)*meshEach {
				for _, m := range left {
					known, lanes := m.peers()
					b, _ := os.ReadFile(m.log)
					t.Logf("%s has %d peers and %d lanes; its log ends with %s", m.endpoint, known, lanes,
						b[max(0, len(b)-1000):])
				}
				t.Fatalf("%s: %d of %d sidecars do not have just the %d others, without a data lane", what,
					len(left), count, count-1)
			}
			<-time.After(100 * time.Millisecond)
		}
	}
	whole("start")
	stay := all[:(count+1)/2]
	before := make([]int, len(stay))
	var sum, sumAfter int64
	<-time.After(time.Second) // calls end
	for i, m := range stay {
		fds, rss := m.costs(t)
		before[i], sum = fds, sum+rss
	}
	began := time.Now()
	logs, ended := churn(t, all[len(stay):], rate, time.Duration(seconds)*time.Second,
		func() *meshed { return newMeshed(t, &ports, "", seed, secret) })
	took := time.Since(began)
	whole("after the churn")
	grown := 0
	<-time.After(time.Second)
	for i, m := range stay {
		fds, rss := m.costs(t)
		grown, sumAfter = max(grown, fds-before[i]), sumAfter+rss
		logs = append(logs, m.log)
	}
	refusals := 0
	for _, path := range logs {
		b, err := os.ReadFile(path)
		ok(t, err)
		for line := range strings.Lines(string(b)) {
			if refusal(line) {
				if refusals++; refusals < 5 {
					t.Errorf("%s", line)
				}
			}
		}
	}
	t.Logf("%d sidecars, %d restarts in %v (%.1f a second): %d refusals; resident %.1f MiB each "+
		"before, %.1f after; at most %d descriptors more", count, ended,
		took.Round(time.Second), float64(ended)/took.Seconds(), refusals,
		float64(sum)/float64(len(stay))/(1<<20), float64(sumAfter)/float64(len(stay))/(1<<20), grown)
	if grown > 4 {
		t.Errorf("a sidecar has %d descriptors more than before the churn", grown)
	}
	if float64(sumAfter) > 1.25*float64(sum)+float64(len(stay))*(4<<20) {
		t.Errorf("%d bytes were resident before the churn, %d after", sum, sumAfter)
	}
}
