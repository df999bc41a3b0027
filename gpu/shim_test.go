package gpu

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
)

// shimDir is the output of newShim; TestMain removes it.
var shimDir string

func TestMain(m *testing.M) {
	code := m.Run()
	if shimDir != "" {
		_ = os.RemoveAll(shimDir)
	}
	os.Exit(code)
}

var buildShim = sync.OnceValues(func() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "kvspray-shim-"); err != nil {
		return "", err
	}
	shimDir = dir
	cc := strings.Fields(os.Getenv("CC"))
	if len(cc) == 0 {
		cc = []string{"gcc"}
	}
	pybind := func(names ...string) (out []string) {
		for _, n := range names {
			out = append(out, filepath.Join("..", "pybind", n))
		}
		return out
	}
	flags := append(cc[1:], "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1",
		"-g", "-pthread")
	for _, args := range [][]string{
		append(pybind("tests/fake_cuda.c"), "-shared", "-fPIC", "-o", filepath.Join(dir,
			"libfake_cuda.so")),
		append(pybind("tests/work_engine.c", "src/work.c", "src/work_gpu.c", "src/work_list.c",
			"src/work_slots.c", "src/graph.c", "src/cuda.c", "src/system.c"), "-DARMED_US=200",
			"-I"+pybind("include")[0], "-I"+pybind("src")[0], "-ldl",
			"-o", filepath.Join(dir, "work_engine")),
	} {
		if out, err := exec.Command(cc[0], append(flags[:len(flags):len(flags)],
			args...)...).CombinedOutput(); err != nil {
			return dir, fmt.Errorf("%w\n%s", err, out)
		}
	}
	return dir, nil
})

// shim is the thread of the real library (pybind/src/work.c) in a process of its own, on a driver
// without a GPU. The GPU's memory is a file that both processes map. It tests the memory protocol
// between C and Go.
type shim struct {
	*fakeEngine
	t      testing.TB
	g      *GPUs
	cmd    *exec.Cmd
	socket int
	exit   chan error // of the process
	maps   [][]byte   // boards, which slots may still look at
}

func newShim(t testing.TB) *shim {
	t.Helper()
	cc := strings.Fields(os.Getenv("CC") + " gcc")[0]
	if _, err := exec.LookPath(cc); err != nil {
		testutil.Skip(t, "cc", "needs a C compiler: "+cc+" not found; install gcc, or set CC")
	}
	dir, err := buildShim()
	if err != nil {
		t.Fatal(err)
	}
	p := gputest.NewPlatform(1)
	base := p.Machine.Next
	p.Machine.Base = base
	fd := p.Machine.Share(t)
	cfg := inEngine()
	cfg.Slots = 6
	g := patient(gputest.Must(newGPUs(p, cfg))(t))
	s := &shim{fakeEngine: newFakeEngine(t, p, g, 0, 4<<20), t: t, g: g, exit: make(chan error, 1)}
	s.host = gputest.Must(mem.NewAnonymous("host", 4096))(t)
	pair := gputest.Must(unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0))(t)
	s.socket = pair[0]
	theirs, memory := os.NewFile(uintptr(pair[1]), "socket"),
		os.NewFile(uintptr(gputest.Must(unix.Dup(fd))(t)), "gpu")
	s.cmd = exec.Command(filepath.Join(dir, "work_engine"), fmt.Sprint(uint64(base)),
		fmt.Sprint(gputest.SharedBytes))
	s.cmd.Env = append(os.Environ(), "KVSPRAY_LIBCUDA="+filepath.Join(dir, "libfake_cuda.so"))
	s.cmd.ExtraFiles = []*os.File{theirs, memory}
	s.cmd.Stderr = os.Stderr
	gputest.Must(0, s.cmd.Start())(t)
	t.Cleanup(func() { _ = s.cmd.Process.Kill() }) // where the test has failed; it may be stopped
	gputest.Must(0, errors.Join(theirs.Close(), memory.Close()))(t)
	go func() {
		err := s.cmd.Wait()
		s.exited.Store(true)
		s.exit <- err
	}()
	u := s.region.Device().(*GPU)
	cache := s.region.Base()
	s.say("lend %d %d", cache, len(s.cache))
	s.say("lend %d %d", uint64(u.staging), u.stagingBytes())
	s.say("region 0 0") // the host's
	s.say("region %d %d", cache, len(s.cache))
	return s
}

// shimState is what each answer contains.
type shimState struct{ moved, astray, jobs, overs, inGraphs, moveWaits int }

// say runs a command, and returns the state after it.
func (s *shim) say(format string, args ...any) (st shimState) {
	st, _ = s.ask(fmt.Sprintf(format, args...))
	return st
}

func (s *shim) ask(command string) (st shimState, fds []int) {
	s.t.Helper()
	gputest.Must(0, unix.Send(s.socket, []byte(command), unix.MSG_NOSIGNAL))(s.t)
	answer, control := make([]byte, 512), make([]byte, unix.CmsgSpace(2*4))
	n, k, _, _, err := unix.Recvmsg(s.socket, answer, control, unix.MSG_CMSG_CLOEXEC)
	if err != nil || n == 0 {
		s.t.Fatalf("%s: no answer: %v", command, err)
	}
	if _, err := fmt.Sscan(string(answer[:n]), &st.moved, &st.astray, &st.jobs, &st.overs,
		&st.inGraphs, &st.moveWaits); err != nil {
		s.t.Fatalf("%s: %q: %v", command, answer[:n], err)
	}
	for _, m := range gputest.Must(unix.ParseSocketControlMessage(control[:k]))(s.t) {
		fds = append(fds, gputest.Must(unix.ParseUnixRights(&m))(s.t)...)
	}
	return st, fds
}

// begin opens a session: its board is attached.
func (s *shim) begin() {
	s.t.Helper()
	_, fds := s.ask("begin")
	if len(fds) != 2 {
		s.t.Fatalf("%d descriptors", len(fds))
	}
	b := gputest.Must(unix.Mmap(fds[0], 0, board.WorkBytes, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_SHARED))(s.t)
	s.maps = append(s.maps, b)
	gputest.Must(0, unix.Close(fds[0]))(s.t)
	s.t.Cleanup(func() { _ = unix.Close(fds[1]) })
	ring := func() {
		if _, err := unix.Write(fds[1], binary.LittleEndian.AppendUint64(nil, 1)); err != nil {
			s.t.Error(err)
		}
	}
	s.detach = s.g.Attach(Engine{Work: gputest.Must(board.ParseWork(b))(s.t),
		Regions: []*mem.Region{s.host, s.region}, Exited: s.exited.Load, Ring: ring,
		End: func() { s.ended.Add(1) }})
	if !s.opened() {
		s.t.Fatal("the engine takes no work")
	}
}

// end closes the session, on both sides.
func (s *shim) end() {
	s.detach()
	s.say("end")
}

// quit ends the process, which must have reported no error.
func (s *shim) quit(want string) {
	s.t.Helper()
	gputest.Must(0, unix.Close(s.socket))(s.t)
	switch err := <-s.exit; {
	case want == "" && err != nil, want != "" && (err == nil || err.Error() != want):
		s.t.Errorf("the engine's process ended with %v, want %q", err, want)
	}
	for _, b := range s.maps {
		gputest.Must(0, unix.Munmap(b))(s.t)
	}
	s.region.Release()
	s.host.Release()
	gputest.Must(0, s.g.Close())(s.t)
}

// inFlight waits until so many kernels and stores are queued in the driver.
func (s *shim) inFlight(n int) {
	s.t.Helper()
	until(s.t, "a kernel is in the driver", func() bool { return s.say("look").jobs >= n })
}

// gather starts a gather of blocks with known content.
func (s *shim) gather(seed uint64) (result chan error) {
	r := rand.New(rand.NewPCG(seed, seed))
	blocks := s.scattered(r, 60)
	var want []byte
	for _, b := range blocks {
		p := s.cache[b.Off:][:b.Len]
		for i := range p {
			p[i] = byte(r.Uint32())
		}
		want = append(want, p...)
	}
	result = make(chan error, 1)
	go func() {
		got := make([]byte, len(want))
		err := s.region.Device().Gather(got, blocks)
		if err == nil && !bytes.Equal(got, want) {
			err = errors.New("what was gathered differs")
		}
		result <- err
	}()
	return result
}

// arrives waits for a copy, which must not wait for a lost context: another method moves the bytes.
func (s *shim) arrives(result chan error, what string) {
	s.t.Helper()
	select {
	case err := <-result:
		if err != nil {
			s.t.Errorf("%s: %v", what, err)
		}
	case <-time.After(patience):
		s.t.Fatalf("%s: the slot waits for an engine that has reported nothing", what)
	}
}

// roundTrips scatters and gathers random blocks from several goroutines, so that several slots and
// streams are used, and returns the number of copies.
func (s *shim) roundTrips(seed uint64) (slots int) {
	var wg sync.WaitGroup
	var trips atomic.Int32
	for k := range uint64(4) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, k))
			var mine []mem.Block // a quarter of the cache, of blocks of one length or of many
			for i := range uint64(64) {
				mine = append(mine, mem.Block{Region: s.region, Off: k<<20 + i*16384,
					Len: 16 * (1 + r.Uint64N(256))})
				if k%2 == 0 {
					mine[i].Len = 4096
				}
			}
			for range 40 {
				r.Shuffle(len(mine), func(i, j int) { mine[i], mine[j] = mine[j], mine[i] })
				if err := s.roundTrip(r, mine); err != nil {
					s.t.Error(err)
					return
				}
				trips.Add(1)
			}
		})
	}
	wg.Wait()
	return 2 * int(trips.Load())
}

// TestShimPacks: random blocks over two sessions.
func TestShimPacks(t *testing.T) {
	s := newShim(t)
	for session := range uint64(2) {
		s.begin()
		before := s.say("look").moved
		slots := s.roundTrips(session)
		even := []mem.Block{} // strided, backwards too
		for i := range uint64(64) {
			even = append(even, mem.Block{Region: s.region, Off: 3<<20 - i*4096, Len: 4096})
		}
		if err := s.roundTrip(rand.New(rand.NewPCG(2, 2)), even); err != nil {
			t.Error(err)
		}
		if err := s.roundTrip(rand.New(rand.NewPCG(3, 3)), crosswise(s.region, 5)); err != nil {
			t.Error(err)
		}
		if st := s.say("look"); st.moved-before != slots+4 || st.astray != 0 {
			t.Errorf("session %d: %d kernels for %d slots, %d astray", session, st.moved-before,
				slots+4, st.astray)
		}
		s.end()
		until(t, "the session's board is let go",
			func() bool { return s.say("look").overs == int(session)+1 })
		if s.ended.Load() != int32(session)+1 {
			t.Errorf("End was called %d times", s.ended.Load())
		}
	}
	s.quit("")
}

// TestShimContextBreaks: the context is lost before, between or after the two stores of a slot. The
// waiting copy is refused, and another method moves the bytes.
func TestShimContextBreaks(t *testing.T) {
	for _, after := range []int{0, 1, 2} {
		s := newShim(t)
		s.begin()
		s.say("hold 1")
		result := s.gather(uint64(after))
		s.inFlight(3)
		s.say("break %d", after)
		s.say("hold 0")
		s.arrives(result, fmt.Sprintf("after %d", after))
		before := s.say("look").moved
		if err := <-s.gather(7); err != nil {
			t.Error(err)
		}
		if n := s.say("look").moved; n != before {
			t.Errorf("after %d: the engine was asked again", after)
		}
		s.end()
		s.quit("")
	}
}

// TestShimDies: kill -9 during a kernel. The copy fails when the exit is proved, not before, and
// its buffer is not used again.
func TestShimDies(t *testing.T) {
	s := newShim(t)
	s.begin()
	s.say("hold 1")
	result := s.gather(1)
	s.inFlight(3)
	select {
	case err := <-result:
		t.Fatalf("the engine lives and has done nothing, and its slot returned: %v", err)
	case <-time.After(3 * workExitLook): // for what must not come
	}
	gputest.Must(0, s.cmd.Process.Kill())(t)
	if err := <-result; !errors.Is(err, errEngineGone) {
		t.Errorf("error %v", err)
	}
	s.detach()
	if err := <-s.gather(2); err != nil {
		t.Error(err)
	}
	s.quit("signal: killed")
}

// stopped returns when every thread of the process has stopped: a thread may take a slot after the
// signal was sent.
func (s *shim) stopped() {
	s.t.Helper()
	until(s.t, "every thread is stopped", func() bool {
		all, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", s.cmd.Process.Pid))
		if err != nil || len(all) == 0 {
			s.t.Fatal("no threads: ", err)
		}
		return !slices.ContainsFunc(all, func(path string) bool {
			stat, err := os.ReadFile(path)
			return err == nil && !bytes.Contains(stat, []byte(") T "))
		})
	})
}

// TestShimSleeps: a stopped engine takes nothing, and its slots are revoked. When it continues it
// takes the next work, and never revoked work.
func TestShimSleeps(t *testing.T) {
	s := newShim(t)
	s.begin()
	n := (*s.region.Device().(*GPU).engines.Load())[0]
	s.g.workTimeout = workTimeout
	before := s.say("look").moved
	gputest.Must(0, s.cmd.Process.Signal(syscall.SIGSTOP))(t)
	s.stopped()
	for i := range uint64(5) {
		n.rest.Store(0)
		if err := <-s.gather(i); err != nil {
			t.Error(err)
		}
	}
	gputest.Must(0, s.cmd.Process.Signal(syscall.SIGCONT))(t)
	patient(s.g)
	n.rest.Store(0)
	if err := <-s.gather(9); err != nil {
		t.Error(err)
	}
	if got := s.say("look").moved - before; got != 1 {
		t.Errorf("%d kernels: want the one after it woke up", got)
	}
	s.end()
	s.quit("")
}
