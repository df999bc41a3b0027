package copybench

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/lab/progress"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// patience bounds the waits of a round.
const patience = time.Minute

// source is the parent.
type source struct {
	o       options
	line    *progress.Line
	setup   setup
	slice   int // bytes
	window  int
	src     *mem.Region
	dst     *mem.Region // the child's; only the C baseline and the child touch it
	space   *space
	dstAt   []uint64
	backend transport.Backend
	host    *host
	lanes   []transport.Lane
	gen     transfer.Gen
	origin  *transport.Origin

	child *exec.Cmd
	enc   *json.Encoder
	dec   *json.Decoder
	pipes []io.Closer

	conns  []*net.TCPConn // of the tcp baseline
	vecs   []*vector
	copies []string // of the child

	cpath string // of the C baseline
	c     *cBaseline

	mu    sync.Mutex // protects the round under way
	next  uint32
	total uint32
	left  uint32 // chunks that have not landed
	fail  error
	end   chan struct{}
}

func newSource(ctx context.Context, o options, path []string) (_ *source, err error) {
	s := &source{o: o}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if o.Transport == "shm" {
		if s.cpath, err = findBaseline(o.Baseline); err != nil {
			return nil, err
		}
	}
	if s.src, err = mem.NewAnonymous("bench-source", regionBytes, mem.Populate()); err != nil {
		return nil, err
	}
	if s.dst, err = mem.NewAnonymous("bench-destination", regionBytes, mem.Populate()); err != nil {
		return nil, err
	}
	s.setup = setup{Transport: o.Transport, CRC32C: o.Integrity == "crc32c",
		AEAD: o.Integrity == "aead", Conns: o.Conns, Slice: o.Slice, Window: o.Window, Total: o.Total}
	_, _ = rand.Read(s.setup.Parent[:])
	_, _ = rand.Read(s.setup.Child[:])
	_, _ = rand.Read(s.setup.Key[:])
	if err := s.startChild(ctx, path); err != nil {
		return nil, err
	}
	var r reply
	if err := s.ask(&command{Setup: &s.setup}, &r); err != nil {
		return nil, err
	}
	s.copies = r.Copies
	if s.backend, err = newBackend(&s.setup); err != nil {
		return nil, err
	}
	s.host = newHost(transport.Peer{Boot: s.setup.Child, Self: s.setup.Parent, Key: s.setup.Key},
		s.results)
	rails, err := s.backend.Open(ctx, s.host)
	if err != nil {
		return nil, err
	}
	for range o.Conns {
		l, err := s.backend.Dial(ctx, s.host.peer, rails[0], r.Rails[0])
		if err != nil {
			return nil, err
		}
		s.lanes = append(s.lanes, l)
	}
	s.slice, s.window = s.backend.Caps().SliceBytes, min(o.Window, s.lanes[0].MaxInFlight())
	if o.Slice > 0 {
		s.slice = o.Slice
	}
	for i := range o.Conns {
		if o.Transport != "tcp" {
			break
		}
		nc, err := (&net.Dialer{}).DialContext(ctx, "tcp", r.Plain)
		if err != nil {
			return nil, err
		}
		c := nc.(*net.TCPConn)
		s.conns = append(s.conns, c)
		if _, err := c.Write([]byte{byte(i)}); err != nil {
			return nil, err
		}
		raw, err := c.SyscallConn()
		if err != nil {
			return nil, err
		}
		s.vecs = append(s.vecs, newVector(raw, true))
	}
	return s, nil
}

// startChild runs this program once more, with the destination memfd.
func (s *source) startChild(ctx context.Context, path []string) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	dup, err := dupFile(s.dst)
	if err != nil {
		return err
	}
	defer func() { _ = dup.Close() }()
	s.child = exec.CommandContext(ctx, exe, append(path, "--role", roleSink)...)
	s.child.ExtraFiles = []*os.File{dup}
	s.child.Stderr = os.Stderr
	in, err := s.child.StdinPipe()
	if err != nil {
		return err
	}
	out, err := s.child.StdoutPipe()
	if err != nil {
		return err
	}
	if err := s.child.Start(); err != nil {
		s.child = nil
		return fmt.Errorf("copy: start the second process: %w", err)
	}
	s.pipes = []io.Closer{in}
	s.enc, s.dec = json.NewEncoder(in), json.NewDecoder(out)
	return nil
}

func dupFile(r *mem.Region) (*os.File, error) {
	fd, err := unix.FcntlInt(uintptr(r.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("copy: duplicate a memfd: %w", err)
	}
	return os.NewFile(uintptr(fd), "memfd"), nil
}

func (s *source) ask(c *command, r *reply) error {
	if err := s.enc.Encode(c); err != nil {
		return fmt.Errorf("second process: %w", err)
	}
	*r = reply{}
	if err := s.dec.Decode(r); err != nil {
		return fmt.Errorf("second process: %w", err)
	}
	if r.Err != "" {
		return fmt.Errorf("second process: %s", r.Err)
	}
	return nil
}

func (s *source) close() {
	for _, c := range s.conns {
		_ = c.Close()
	}
	if s.backend != nil {
		_ = s.backend.Close()
	}
	s.stopC()
	for _, p := range s.pipes {
		_ = p.Close()
	}
	if s.child != nil {
		_ = s.child.Wait()
	}
	for _, r := range []*mem.Region{s.src, s.dst} {
		if r != nil {
			r.Release()
		}
	}
}

func (s *source) layout(block int, seed uint64) error {
	b, _ := s.src.Bytes()
	s.space = &space{region: s.src, bytes: b, block: block, total: s.o.Total, at: scatter(block,
		s.o.Total, seed)}
	s.dstAt = scatter(block, s.o.Total, seed+1)
	s.stopC()
	return s.ask(&command{Layout: &layout{Block: block, Seed: seed + 1}}, &reply{})
}

// moveAll is one round through the backend.
func (s *source) moveAll(ctx context.Context, seed uint64) (sample, error) {
	s.space.write(seed)
	s.gen++
	var r reply
	if err := s.ask(&command{Open: &opening{Gen: s.gen}}, &r); err != nil {
		return sample{}, err
	}
	o := &transport.Origin{Peer: s.setup.Child, Slot: 1, Gen: s.gen, Memory: s.space,
		Valid: func(transfer.LeaseID) bool { return true }, Token: r.Token}
	s.host.mu.Lock()
	s.host.origin = o
	s.host.mu.Unlock()
	cpu, began := cpuTime(), time.Now()
	s.mu.Lock()
	s.origin, s.next, s.total, s.fail, s.end = o, 0, uint32(s.o.Total/chunk), nil, make(chan struct{})
	s.left = s.total
	end := s.end
	s.mu.Unlock()
	for range s.window {
		for _, l := range s.lanes {
			s.another(l)
		}
	}
	select {
	case <-end:
	case <-time.After(patience):
		return sample{}, fmt.Errorf("no end after %s", patience)
	case <-ctx.Done():
		return sample{}, ctx.Err()
	}
	us := sample{wall: time.Since(began), cpu: cpuTime() - cpu}
	s.mu.Lock()
	fail := s.fail
	s.mu.Unlock()
	if fail != nil {
		return sample{}, fail
	}
	if err := s.ask(&command{Ended: true}, &r); err != nil {
		return sample{}, err
	}
	us.cpu += r.CPU
	o.Revoke()
	if err := s.backend.CloseOrigin(ctx, o); err != nil {
		return sample{}, err
	}
	if err := s.ask(&command{Check: &seed}, &r); err != nil {
		return sample{}, err
	}
	if r.Wrong > 0 {
		return sample{}, fmt.Errorf("%w: %d blocks", errContent, r.Wrong)
	}
	return us, nil
}

// another gives a lane its next slice, as the executor would: whichever lane has room takes what is
// next.
func (s *source) another(l transport.Lane) {
	s.mu.Lock()
	r := transfer.Range{First: s.next, Count: min(uint32(s.slice/chunk), s.total-s.next)}
	s.next = r.End()
	o := s.origin
	s.mu.Unlock()
	if r.Count == 0 {
		return
	}
	if err := l.Move([]transport.Slice{{Origin: o, Range: r, Attempt: 1}}); err != nil {
		s.ended(0, err)
	}
}

func (s *source) results(l transport.Lane, res []transport.Result) {
	var n uint32
	var err error
	for i := range res {
		if res[i].Outcome != transfer.Landed {
			err = fmt.Errorf("chunks %d+%d: %s %s: %w", res[i].Range.First, res[i].Range.Count,
				res[i].Outcome, res[i].Reason, res[i].Err)
		}
		n += res[i].Range.Count
	}
	for range res {
		s.another(l)
	}
	s.ended(n, err)
}

func (s *source) ended(n uint32, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.end == nil {
		return
	}
	s.left -= n
	s.fail = errors.Join(s.fail, err)
	if s.left == 0 || s.fail != nil {
		close(s.end)
		s.end = nil
	}
}

func (s *source) baselineName() string {
	if s.o.Transport == "tcp" {
		return fmt.Sprintf("Go, writev to readv of contiguous %d KiB, %d connections",
			plainBytes>>10, s.o.Conns)
	}
	return fmt.Sprintf("C memcpy of the same blocks, %d threads", s.o.Conns)
}

// baseline is one round of what the machine does without us.
func (s *source) baseline(seed uint64) (sample, error) {
	if s.o.Transport == "tcp" {
		return s.plainRound(seed)
	}
	return s.cRound(seed)
}

func (s *source) plainRound(seed uint64) (sample, error) {
	b, _ := s.src.Bytes()
	flat := &space{bytes: b, block: chunk, total: s.o.Total, at: contiguous(s.o.Total)}
	flat.write(seed)
	var r reply
	if err := s.ask(&command{Plain: true}, &r); err != nil {
		return sample{}, err
	}
	errs := make([]error, len(s.conns))
	cpu, began := cpuTime(), time.Now()
	var wg sync.WaitGroup
	for i, c := range s.conns {
		wg.Go(func() {
			from, to := share(s.o.Total, s.o.Conns, i)
			for at := from; at < to && errs[i] == nil; at += plainBytes {
				errs[i] = s.vecs[i].all(b[at:min(at+plainBytes, to)])
			}
			var ack [1]byte
			if errs[i] == nil {
				_, errs[i] = io.ReadFull(c, ack[:])
			}
		})
	}
	wg.Wait()
	us := sample{wall: time.Since(began), cpu: cpuTime() - cpu}
	if err := errors.Join(errs...); err != nil {
		return sample{}, fmt.Errorf("baseline: %w", err)
	}
	if err := s.ask(&command{Ended: true}, &r); err != nil {
		return sample{}, err
	}
	us.cpu += r.CPU
	if err := s.ask(&command{Verify: &seed}, &r); err != nil {
		return sample{}, err
	}
	if r.Wrong > 0 {
		return sample{}, fmt.Errorf("baseline: %w", errContent)
	}
	return us, nil
}

// baselineBinary is what `make build` calls the C program.
const baselineBinary = "kvspray-memcpy"

func findBaseline(flag string) (string, error) {
	tried := []string{flag}
	if flag == "" {
		tried = nil
		if exe, err := os.Executable(); err == nil {
			tried = append(tried, filepath.Join(filepath.Dir(exe), baselineBinary))
		}
		tried = append(tried, filepath.Join("bin", baselineBinary))
	}
	for _, p := range tried {
		if st, err := os.Stat(p); err == nil && !st.IsDir() {
			return filepath.Abs(p)
		}
	}
	return "", fmt.Errorf("copy: the C baseline is not at %q; run `make bin/kvspray-memcpy`, or "+
		"name it with --baseline", tried)
}

// cBaseline is the running C program.
type cBaseline struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func (s *source) stopC() {
	if s.c == nil {
		return
	}
	_ = s.c.in.Close()
	_ = s.c.cmd.Wait()
	s.c = nil
}

func (s *source) startC() error {
	var files []*os.File
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	for _, r := range []*mem.Region{s.src, s.dst} {
		f, err := dupFile(r)
		if err != nil {
			return err
		}
		files = append(files, f)
	}
	cmd := exec.Command(s.cpath)
	cmd.ExtraFiles, cmd.Stderr = files, os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start %s: %w", s.cpath, err)
	}
	s.c = &cBaseline{cmd: cmd, in: in, out: bufio.NewReader(out)}
	words := []uint64{regionBytes, uint64(s.space.block), uint64(len(s.space.at)), uint64(s.o.Conns),
		uint64(s.space.total)}
	words = append(append(words, s.space.at...), s.dstAt...)
	return binary.Write(in, binary.LittleEndian, words)
}

func (s *source) cRound(seed uint64) (sample, error) {
	fail := func(err error) (sample, error) {
		return sample{}, fmt.Errorf("baseline %s: %w: is it what `make bin/kvspray-memcpy` builds? "+
			"Name another one with --baseline", s.cpath, err)
	}
	if s.c == nil {
		if err := s.startC(); err != nil {
			return fail(err)
		}
	}
	s.space.write(seed)
	if _, err := s.c.in.Write([]byte{1}); err != nil {
		return fail(err)
	}
	var wall, cpu int64
	if _, err := fmt.Fscan(s.c.out, &wall, &cpu); err != nil {
		return fail(err)
	}
	b, _ := s.dst.Bytes()
	got := &space{bytes: b, block: s.space.block, total: s.o.Total, at: s.dstAt}
	if n := got.wrong(seed); n > 0 {
		return sample{}, fmt.Errorf("baseline: %w: %d blocks", errContent, n)
	}
	return sample{wall: time.Duration(wall), cpu: time.Duration(cpu)}, nil
}
