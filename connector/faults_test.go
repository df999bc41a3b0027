package connector_test

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/transfer"
)

func memfd(t testing.TB, size int64, seals int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("bad", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	must(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	must(t, unix.Ftruncate(fd, size))
	if seals != 0 {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		must(t, err)
	}
	return fd
}

const sealed = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// TestRegisterRefused: each bad registration gets an error with code, field and remedy; the session
// serves on.
func TestRegisterRefused(t *testing.T) {
	r := start(t, nil)
	size := int64(shape.Layers) * int64(shape.NumBlocks) * int64(shape.PageBytes())
	replace := func(i int, fd int) func(*msg.Register, []int) []int {
		return func(_ *msg.Register, fds []int) []int { fds[i] = fd; return fds }
	}
	relayout := func(change func(*layout.Layout)) func(*msg.Register, []int) []int {
		return func(m *msg.Register, fds []int) []int {
			l := shape.Layout()
			change(l)
			m.Layout, _ = l.Marshal()
			return fds
		}
	}
	blocking, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	must(t, err)
	defer unix.Close(blocking)
	self, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	must(t, err)
	defer self.Close()
	for name, c := range map[string]struct {
		tamper            func(*msg.Register, []int) []int
		code, field, text string
	}{
		"unsealed region": {replace(4, memfd(t, size, 0)), msg.CodeRegion, "regions[0]", "sealed"},
		"half sealed": {replace(4, memfd(t, size, unix.F_SEAL_GROW)), msg.CodeRegion,
			"regions[0]", "sealed"},
		"short region": {replace(4, memfd(t, 4096, sealed)), msg.CodeRegion, "regions[0]",
			"announced"},
		"unsealed flags": {replace(0, memfd(t, 8192, 0)), msg.CodeBoard, "fds.flags", "sealed"},
		"blank flags":    {replace(0, memfd(t, 8192, sealed)), msg.CodeBoard, "fds.flags", "magic"},
		"empty flags":    {replace(0, memfd(t, 0, sealed)), msg.CodeBoard, "fds.flags", ""},
		"blank rings":    {replace(1, memfd(t, 1<<20, sealed)), msg.CodeBoard, "fds.rings", "magic"},
		"huge rings":     {replace(1, memfd(t, 1<<33, sealed)), msg.CodeBoard, "fds.rings", "at most"},
		"SQ eventfd a memfd": {replace(2, memfd(t, 4096, sealed)), msg.CodeBoard,
			"fds.sq_eventfd", "eventfd"},
		"blocking CQ eventfd": {replace(3, blocking), msg.CodeBoard, "fds.cq_eventfd", "blocks"},
		"no descriptor": {func(m *msg.Register, fds []int) []int { return fds[:4] }, msg.CodeProtocol,
			"regions[0].fd", "4 descriptors came"},
		"index twice": {func(m *msg.Register, fds []int) []int { m.Regions[0].FD = 1; return fds },
			msg.CodeProtocol, "regions[0].fd", "twice"},
		"memory twice": {func(m *msg.Register, fds []int) []int {
			again := m.Regions[0]
			again.Region, again.FD = [16]byte{1}, uint32(len(fds))
			m.Regions = append(m.Regions, again)
			return append(fds, fds[4])
		}, msg.CodeRegion, "regions[1].fd", "same memory"},
		"id twice": {func(m *msg.Register, fds []int) []int {
			again := m.Regions[0]
			again.FD = uint32(len(fds))
			m.Regions = append(m.Regions, again)
			return append(fds, memfd(t, size, sealed))
		}, msg.CodeRegion, "regions[1].region", "regions[0]"},
		"overlapping process regions": {func(m *msg.Register, fds []int) []int {
			b, _ := region(t, shape).Bytes()
			addr := addressOf(b)
			m.Regions = []msg.Region{{Region: [16]byte{1}, Kind: msg.KindProcess, Bytes: 8192,
				Addr: addr, FD: 4},
				{Region: [16]byte{2}, Kind: msg.KindProcess, Bytes: 8192, Addr: addr + 4096, FD: 5}}
			return append(fds[:4], int(self.Fd()), int(self.Fd()))
		}, msg.CodeRegion, "regions[1]", "overlaps"},
		"zero id": {func(m *msg.Register, fds []int) []int {
			m.Regions[0].Region = [16]byte{}
			return fds
		}, msg.CodeRegion, "regions[0].region", "zero"},
		"unknown kind": {func(m *msg.Register,
			fds []int) []int {
			m.Regions[0].Kind = "tape"
			return fds
		}, msg.CodeRegion, "regions[0]", "tape"},
		"no region": {func(m *msg.Register, fds []int) []int { m.Regions = nil; return fds },
			msg.CodeRegion, "regions", "none"},
		"other session": {func(m *msg.Register, fds []int) []int { m.Session[0]++; return fds },
			msg.CodeBoard, "fds.rings", "session"},
		"blocks outside": {relayout(func(l *layout.Layout) { l.Groups[0].NumBlocks *= 2 }),
			msg.CodeLayout, "layout", "region"},
		"strategy": {relayout(func(l *layout.Layout) { l.Groups[0].Strategy = "none" }),
			msg.CodeLayout, "layout", "unknown"},
		"layers overlap": {relayout(func(l *layout.Layout) { l.Groups[0].Layers[1].Base = 0 }),
			msg.CodeLayout, "layout", "shares bytes"},
		"one layer twice": {relayout(func(l *layout.Layout) {
			l.Groups[0].Layers[1].Name = l.Groups[0].Layers[0].Name + "#again"
		}), msg.CodeLayout, "layout", "register it once"},
		"flag index": {relayout(func(l *layout.Layout) { l.Groups[0].Layers[1].Index = 4 }),
			msg.CodeLayout, "layout.groups[0].layers[1].index", "4 layer flags"},
		"no dtype": {relayout(func(l *layout.Layout) { l.DType = "" }), msg.CodeLayout,
			"layout.dtype", "the type of the cache's elements"},
		"no identity": {relayout(func(l *layout.Layout) { l.Identity = nil }), msg.CodeLayout,
			"layout.identity", "without backoff, groups, head_size, layers, model_config, rope, " +
				"speculative, weights:"},
		"no head size": {relayout(func(l *layout.Layout) {
			delete(l.Identity, parseblock.IdentityHeadSize)
		}), msg.CodeLayout, "layout.identity", "without head_size:"},
		"no groups": {relayout(func(l *layout.Layout) {
			delete(l.Identity, parseblock.IdentityGroups)
		}), msg.CodeLayout, "layout.identity", "without groups:"},
		"layout no sense": {func(m *msg.Register, fds []int) []int {
			m.Layout = []byte{0x81, 0xa1, 'x',
				0x01}
			return fds
		}, msg.CodeLayout, "layout", ""},
	} {
		t.Run(name, func(t *testing.T) {
			w, err := connectortest.NewWorker(r.config(t,
				func(cfg *connectortest.Config) { cfg.Tamper = c.tamper }))
			must(t, err)
			defer w.Close()
			_, err = w.Connect(testContext(t))
			var se *connectortest.ServerError
			if !errors.As(err, &se) {
				t.Fatalf("registered, or no answer: %v", err)
			}
			text := se.Message + "; " + se.Remedy
			if se.Code != c.code || !strings.HasPrefix(se.Field, c.field) ||
				!strings.Contains(text, c.text) || se.Remedy == "" || se.Fatal ||
				strings.HasSuffix(se.Message, se.Remedy) {
				t.Fatalf("got %+v", se.ErrorMessage)
			}
		})
	}
	// And it serves on.
	r.worker(t, nil)
}

// TestDecline: a scheduler's word reaches the control layer with the place of its engine; one of a
// worker does not.
func TestDecline(t *testing.T) {
	r := start(t, nil)
	x, h := key()
	dial := func() *connectortest.Scheduler {
		s, err := connectortest.DialScheduler(testContext(t),
			connectortest.SchedulerConfig{Socket: r.socket, Engine: msg.Engine{Name: "vllm", ID: "e7"},
				Ranks: msg.Ranks{PP: msg.Rank{Size: 2}, TP: msg.Rank{Size: 4}}})
		must(t, err)
		return s
	}
	for field, m := range map[string]msg.Decline{
		"peer":  {Xfer: x, Hash: h},
		"ranks": {Xfer: x, Hash: h, Peer: "p:1", Req: "r", Ranks: []uint32{7, 8}},
	} {
		s := dial()
		must(t, s.Decline(m))
		e, err := s.WaitError(testContext(t), msg.CodeProtocol)
		must(t, err)
		if e.Field != field || e.Fatal {
			t.Fatalf("%s: %+v", field, e)
		}
		must(t, s.Close())
	}
	s := dial()
	defer s.Close()
	m := msg.Decline{Xfer: x, Hash: h, Peer: "p:1", Reason: "aborted"}
	must(t, s.Decline(m))
	m.Req, m.Ranks = "r", []uint32{0, 7}
	must(t, s.Decline(m))
	r.rec.until(t, "declines", func() bool { return len(r.rec.declines) == 2 })
	got := r.rec.seen().declines[0]
	if ranks := r.rec.seen().declines[1]; ranks.Req != "r" || !slices.Equal(ranks.Ranks, m.Ranks) ||
		got.Req != "" || got.Ranks != nil {
		t.Fatalf("%+v, %+v", got, ranks)
	}
	if got.World != 8 || got.Engine != "vllm/e7" || got.Key != (transfer.Key{Xfer: x, Hash: h}) ||
		got.Peer != "p:1" || got.Reason != "aborted" ||
		got.Boot == (transfer.Boot{}) || got.ID == 0 {
		t.Fatalf("%+v", got)
	}
}

// TestSchedulerGone: the end of a scheduler's session reaches the control layer with the number
// that its queries had. No other session has that number.
func TestSchedulerGone(t *testing.T) {
	r := start(t, nil)
	x, h := key()
	var sessions []uint64
	for i := range 2 {
		s, err := connectortest.DialScheduler(testContext(t),
			connectortest.SchedulerConfig{Socket: r.socket, Engine: msg.Engine{Name: "vllm", ID: "e7"}})
		must(t, err)
		ended, end := context.WithCancel(testContext(t))
		var asked sync.WaitGroup
		asked.Go(func() { _, _ = s.Await(ended, x, h, "p:1", 4, time.Second) })
		r.rec.until(t, "await", func() bool { return len(r.rec.awaits) == i+1 })
		sessions = append(sessions, r.rec.seen().awaits[i].Session)
		must(t, s.Close())
		r.rec.until(t, "the end", func() bool { return slices.Equal(r.rec.schedulersGone, sessions) })
		end()
		asked.Wait()
	}
	if sessions[0] == 0 || sessions[0] == sessions[1] {
		t.Errorf("ended sessions %v, want that of the queries", sessions)
	}
}

// TestBadPackets: whatever comes in a packet, the session answers and serves on until it has been
// too much.
func TestBadPackets(t *testing.T) {
	r := start(t, nil)
	s, err := connectortest.DialScheduler(testContext(t),
		connectortest.SchedulerConfig{Socket: r.socket})
	must(t, err)
	defer s.Close()
	must(t, s.SendRaw([]byte{1}))
	e, err := s.WaitError(testContext(t), msg.CodeProtocol)
	must(t, err)
	if e.Fatal || e.Message == "" {
		t.Fatalf("%+v", e)
	}
	nine := binary.LittleEndian.AppendUint32(nil, 99)
	must(t, s.SendRaw(append(nine, 0x80)))
	must(t, s.SendRaw([]byte{6, 0, 0, 0, 0xdf, 0xff, 0xff, 0xff, 0xff}))
	must(t, s.SendRaw([]byte{2, 0, 0, 0, 0x80}))
	x, h := key()
	go func() {
		r.rec.until(t, "await", func() bool { return len(r.rec.awaits) == 1 })
		r.rec.seen().awaits[0].Reply(engines.Admission{State: "admitted", Tokens: 5})
		r.rec.seen().awaits[0].Reply(engines.Admission{State: "gone"}) // only the first counts
	}()
	a, err := s.Await(testContext(t), x, h, "p:1", 5, time.Second)
	must(t, err)
	if a.State != "admitted" || a.Tokens != 5 {
		t.Fatalf("%+v", a)
	}
	if got := r.rec.seen().awaits[0]; got.TTL != time.Second || got.Peer != "p:1" || got.Tokens != 5 ||
		got.Key.Xfer != x {
		t.Fatalf("%+v", got)
	}
	for range 100 {
		if err := s.SendRaw([]byte{0xff}); err != nil {
			break // it had enough
		}
	}
	must(t, s.WaitEnd(testContext(t)))
	if r.bad.get("packet") < 4 {
		t.Errorf("malformed packets counted: %d", r.bad.get("packet"))
	}
	r.worker(t, nil)
}

func TestVersions(t *testing.T) {
	r := start(t, func(o *connector.Options) { o.Release = "0.5.0" })
	for _, c := range []struct {
		min, max msg.Version
		remedy   string // empty: they have a version in common
	}{
		{msg.MakeVersion(1, 0), msg.MakeVersion(1, 9), ""},
		{msg.MakeVersion(0, 3), msg.MakeVersion(1, 0), ""},
		{msg.MakeVersion(2, 0), msg.MakeVersion(2, 1), "upgrade the sidecar"},
		{msg.MakeVersion(0, 1), msg.MakeVersion(0, 9), "upgrade the package in the engine's"},
	} {
		w, err := connectortest.NewWorker(r.config(t, func(cfg *connectortest.Config) {
			cfg.Min, cfg.Max, cfg.Release = c.min, c.max, "0.9.0\n; rm"
		}))
		must(t, err)
		_, err = w.Connect(testContext(t))
		_ = w.Close()
		var se *connectortest.ServerError
		if c.remedy == "" {
			must(t, err)
			continue
		}
		if !errors.As(err, &se) || se.Code != msg.CodeVersion || !strings.Contains(se.Remedy, c.remedy) {
			t.Fatalf("%s to %s: %v, want %q", c.min, c.max, err, c.remedy)
		}
		for _, name := range []string{c.min.String(), msg.VersionMax.String(), `"0.9.0\n; rm"`,
			`"0.5.0"`} {
			if !strings.Contains(se.Message, name) {
				t.Errorf("%q does not name %s", se.Message, name)
			}
		}
	}
}

// TestMalformedRecords: a bad record ends at most the lease that it names.
func TestMalformedRecords(t *testing.T) {
	r := start(t, nil)
	w := r.worker(t, nil)
	good, err := w.Intent(intent(32, 1, 2))
	must(t, err)
	cases := map[string]func(id uint64) error{
		"intent body": func(id uint64) error {
			return w.Push(board.RecIntent, id, []byte{0xc1}, false)
		},
		"intent empty": func(id uint64) error { return w.Push(board.RecIntent, id, nil, false) },
		"intent block": func(id uint64) error { return w.IntentAs(id, intent(32, 1, 64)) },
		"intent groups": func(id uint64) error {
			i := intent(32, 1)
			i.Blocks = nil
			return w.IntentAs(id, i)
		},
		"intent fanout": func(id uint64) error {
			i := intent(32, 1)
			i.Fanout = 17
			return w.IntentAs(id, i)
		},
		"intent ready": func(id uint64) error {
			i := intent(32, 1)
			i.Ready = 33
			return w.IntentAs(id, i)
		},
		"intent no token": func(id uint64) error { return w.IntentAs(id, intent(0, 1)) },
		"intent steps": func(id uint64) error {
			i := intent(32, 1)
			i.Steps = []msg.PendingStep{{Step: 2, End: 3}, {Step: 1, End: 4}}
			return w.IntentAs(id, i)
		},
		"expect block": func(id uint64) error {
			x, h := key()
			return w.Push(board.RecExpect, id, (&msg.Expect{Xfer: x, Hash: h, Peer: "p:1", Tokens: 16,
				Blocks: [][]uint32{{1 << 30}}}).Append(nil), false)
		},
		"expect no peer": func(id uint64) error {
			x, h := key()
			return w.Push(board.RecExpect, id, (&msg.Expect{Xfer: x, Hash: h, Tokens: 16,
				Blocks: [][]uint32{{1}}}).Append(nil), false)
		},
		"expect skip": func(id uint64) error {
			x, h := key()
			return w.Push(board.RecExpect, id, (&msg.Expect{Xfer: x, Hash: h, Peer: "p:1", Tokens: 16,
				Skip: []uint32{17}, Blocks: [][]uint32{{1}}}).Append(nil), false)
		},
	}
	for name, push := range cases {
		t.Run(name, func(t *testing.T) {
			id := w.NewLease()
			must(t, push(id))
			c, err := w.Wait(testContext(t))
			must(t, err)
			reason := ""
			if c.Sent != nil {
				reason = c.Sent.Reason
			} else {
				reason = c.Received.Reason
			}
			if c.Lease != id || c.Status != board.Refused || reason == "" || strings.HasPrefix(name,
				"intent") != (c.Sent != nil) {
				t.Fatalf("completion %+v", c)
			}
		})
	}
	eventually(t, "each of them is counted",
		func() bool { return r.bad.get("intent")+r.bad.get("expect") == len(cases) })
	before := r.bad.get("step") + r.bad.get("unknown") + r.bad.get("intent") + r.bad.get("cancel")
	must(t, w.IntentAs(good, intent(16, 9)))               // open already
	must(t, w.Push(77, good, nil, false))                  // unknown type
	must(t, w.Push(board.RecStep, 0, []byte{0x90}, false)) // not a map
	must(t, w.Step(msg.Step{Step: 3}))                     // fine
	must(t, w.Step(msg.Step{Step: 2}))                     // goes back
	// unknown lease: ignored
	must(t, w.Cancel(999, "race", false))
	must(t, w.Step(msg.Step{Step: 5, Reqs: []msg.StepReq{{Lease: 999, End: 1}}})) // ignored
	must(t, w.Step(msg.Step{Step: 6, Reqs: []msg.StepReq{{Lease: good, End: 32}}}))
	w.SignalStep(6)
	r.rec.until(t, "the good lease goes on", func() bool { return len(r.rec.progress) == 4 })
	if got := r.bad.get("step") + r.bad.get("unknown") + r.bad.get("intent") + r.bad.get("cancel") -
		before; got != 4 {
		t.Errorf("%d malformed records counted, want 4: %v", got, r.bad.n)
	}
	if r.bad.get("ignored cancel") != 1 || r.bad.get("ignored step") != 1 {
		t.Error("races are not counted as such")
	}
	eventually(t, "the shim is told", func() bool { return len(w.Errors()) > 0 })
	if n := strings.Count(r.logs.String(), "malformed record"); n > 6 {
		t.Errorf("%d log lines: each kind is logged once", n)
	}
	// A table that cannot be believed ends its lease.
	must(t, w.Step(msg.Step{Step: 7, Reqs: []msg.StepReq{{Lease: good, End: 32,
		Blocks: [][]uint32{{64}}}}}))
	r.rec.until(t, "cancel", func() bool { return strings.Contains(r.rec.cancels[good], "block 64") })
}

// TestBrokenRing: a ring that cannot be believed ends the worker, not the sidecar.
func TestBrokenRing(t *testing.T) {
	for name, breakIt := range map[string]func(*connectortest.Worker){
		"head": func(w *connectortest.Worker) {
			binary.LittleEndian.PutUint64(w.RawRings()[board.SizeRingsHeader:], 1<<40)
		},
		"epoch of the future": func(w *connectortest.Worker) {
			_ = w.PushEpoch(board.RecHold, 1, 99, nil)
		},
		"epoch goes back": func(w *connectortest.Worker) {
			_ = w.Push(board.RecHold, 1, nil, true)
			_ = w.PushEpoch(board.RecHold, 1, 0, nil)
		},
		"completion tail": func(w *connectortest.Worker) {
			second := board.SizeRingsHeader + board.SizeRing + 1<<20
			binary.LittleEndian.PutUint64(w.RawRings()[second+board.OffRingTail:], 3)
			_ = w.Push(board.RecIntent, w.NewLease(), nil, false) // refused, which needs the ring
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, nil)
			other := r.worker(t, nil)
			w := r.worker(t, nil)
			breakIt(w)
			must(t, w.WakeConsumer())
			r.rec.until(t, "worker gone", func() bool {
				return len(r.rec.gone) == 1 &&
					errors.Is(r.rec.gone[0], connector.ErrBoard)
			})
			must(t, w.WaitEnd(testContext(t)))
			_, err := other.Intent(intent(16, 1))
			must(t, err)
			r.rec.until(t, "the other worker goes on", func() bool {
				for _, in := range r.rec.intents {
					if in.Lease.Boot == other.Boot() {
						return true
					}
				}
				return false
			})
			_, err = w.Connect(testContext(t)) // and so does this one, with fresh rings
			must(t, err)
		})
	}
}

func TestListen(t *testing.T) {
	r := start(t, nil)
	opt := connector.Options{Socket: r.socket, Events: r.rec.handle, Copy: r.rec.copy,
		Endpoint: func() string { return "" }}
	second, err := connector.New(opt)
	must(t, err)
	if err := second.Listen(); err == nil || !strings.Contains(err.Error(), "another sidecar") {
		t.Fatalf("a live socket was taken over: %v", err)
	}
	st, err := os.Stat(r.socket)
	must(t, err)
	if st.Mode().Perm() != 0o600 {
		t.Errorf("socket mode %v", st.Mode())
	}

	// The socket of a dead server is replaced.
	dir, err := os.MkdirTemp("", "kvl")
	must(t, err)
	defer os.RemoveAll(dir)
	opt.Socket = filepath.Join(dir, "sub", "s")
	must(t, os.Mkdir(filepath.Join(dir, "sub"), 0o700))
	dead, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: opt.Socket, Net: "unixpacket"})
	must(t, err)
	dead.SetUnlinkOnClose(false)
	must(t, dead.Close())
	third, err := connector.New(opt)
	must(t, err)
	must(t, third.Listen())
	must(t, third.Close())
	must(t, third.Close())

	must(t, os.WriteFile(opt.Socket, nil, 0o600))
	fourth, err := connector.New(opt)
	must(t, err)
	if err := fourth.Listen(); err == nil || !strings.Contains(err.Error(), "has this path") {
		t.Errorf("a file was replaced: %v", err)
	}
	if _, err := connector.New(connector.Options{Socket: "/" + strings.Repeat("x", 120),
		Events: opt.Events, Copy: opt.Copy, Endpoint: opt.Endpoint}); err == nil {
		t.Error("an endless socket path")
	}
}

func TestUIDRefused(t *testing.T) {
	if os.Getuid() != 0 {
		testutil.Skip(t, "root", "only root can connect as another user")
	}
	r := start(t, func(o *connector.Options) { o.SocketMode = 0o666 })
	must(t, os.Chmod(filepath.Dir(r.socket), 0o755))
	ask := exec.Command("python3", "-c", "import socket,os,sys\nos.setuid(65534)\n"+
		"s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET)\n"+
		"s.connect(sys.argv[1])\nsys.stdout.buffer.write(s.recv(4096))", r.socket)
	out, err := ask.Output()
	must(t, err)
	m, err := msg.DecodePacket(out)
	must(t, err)
	if e, ok := m.(*msg.ErrorMessage); !ok || e.Code != msg.CodePermission || !e.Fatal ||
		!strings.Contains(e.Message, "65534") {
		t.Fatalf("%+v", m)
	}
}

// TestProcessRegion registers memory that nothing shares.
func TestProcessRegion(t *testing.T) {
	r := start(t, nil)
	b, _ := region(t, shape).Bytes()
	self, err := unix.Open("/proc/self/mem", unix.O_RDWR|unix.O_CLOEXEC, 0)
	must(t, err)
	// owns the descriptor
	reg, err := mem.OpenProcess(mem.NewID(), self, addressOf(b), uint64(len(b)))
	must(t, err)
	t.Cleanup(reg.Release)
	w := r.worker(t, func(c *connectortest.Config) { c.Regions = []*mem.Region{reg} })
	copy(b[100:], "hello")
	got := make([]byte, 5)
	must(t, r.lastUp(t).Regions[0].ReadAt(got, 100))
	if string(got) != "hello" {
		t.Errorf("read %q", got)
	}
	_ = w
}

// TestBlockingEventfds: an engine that makes its eventfds block, and fills or empties them, blocks
// only itself.
func TestBlockingEventfds(t *testing.T) {
	r := start(t, nil)
	var sqEvent, cqEvent int
	w := r.worker(t, func(c *connectortest.Config) {
		c.Tamper = func(m *msg.Register, fds []int) []int {
			var err error // of one description with those that are sent
			sqEvent, err = unix.Dup(fds[m.FDs.SQEventfd])
			must(t, err)
			cqEvent, err = unix.Dup(fds[m.FDs.CQEventfd])
			must(t, err)
			return fds
		}
	})
	defer func() { _, _ = unix.Close(sqEvent), unix.Close(cqEvent) }()
	_, err := w.Intent(intent(16, 1))
	must(t, err)
	r.rec.until(t, "intent", func() bool { return len(r.rec.intents) == 1 })
	for _, fd := range []int{sqEvent, cqEvent} {
		fl, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
		must(t, err)
		_, err = unix.FcntlInt(uintptr(fd), unix.F_SETFL, fl&^unix.O_NONBLOCK)
		must(t, err)
	}
	// The sidecar reads its SQ eventfd again, and it is empty.
	_, err = unix.Write(sqEvent, binary.NativeEndian.AppendUint64(nil, 1))
	must(t, err)
	_, err = w.Intent(intent(16, 2))
	must(t, err)
	r.rec.until(t, "second intent", func() bool { return len(r.rec.intents) == 2 })
	_, err = unix.Write(cqEvent, binary.NativeEndian.AppendUint64(nil, ^uint64(0)-1))
	must(t, err)
	// The engine announces sleep, so that the sidecar writes to its CQ eventfd.
	completions := board.SizeRingsHeader + board.SizeRing + 1<<20
	binary.LittleEndian.PutUint32(w.RawRings()[completions+board.OffRingSleeping:], 1)
	done := make(chan error, 3)
	go func() {
		for _, in := range r.rec.seen().intents {
			done <- r.Complete(r.lastUp(t), engines.Completion{Lease: in.Lease})
		}
		done <- r.Close()
	}()
	for range 3 {
		select {
		case err := <-done:
			must(t, err)
		case <-testContext(t).Done():
			t.Fatal("the sidecar waits for an eventfd")
		}
	}
}
