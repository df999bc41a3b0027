package copybench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// roleSink is the value of --role in the second process.
const roleSink = "sink"

// sinkFD is the destination memfd in the child.
const sinkFD = 3

// command is one line from the parent, reply its answer.
type command struct {
	Setup  *setup   `json:",omitempty"`
	Layout *layout  `json:",omitempty"`
	Open   *opening `json:",omitempty"` // a grant for a round
	Check  *uint64  `json:",omitempty"` // fence, and look for the content of that seed
	Plain  bool     `json:",omitempty"` // a round of the tcp baseline is about to begin
	Ended  bool     `json:",omitempty"` // the round is over: CPU time
	Verify *uint64  `json:",omitempty"` // look for a seed's content in contiguous order
}

type layout struct {
	Block int
	Seed  uint64 // of the destination's places
}

type opening struct{ Gen transfer.Gen }

type reply struct {
	Err   string           `json:",omitempty"`
	Rails []transport.Rail `json:",omitempty"`
	Plain string           `json:",omitempty"` // address of the baseline's listener
	Token []byte           `json:",omitempty"`
	CPU   time.Duration    `json:",omitempty"`
	Wrong int              `json:",omitempty"`
	// Copies are the routines that this process, which copies for shm, has chosen.
	Copies []string `json:",omitempty"`
}

// sink is the child.
type sink struct {
	setup   setup
	region  *mem.Region
	space   *space
	backend transport.Backend
	host    *host
	grant   *transport.Grant
	begun   time.Duration

	plain *net.TCPListener
	wg    sync.WaitGroup
}

func runSink(ctx context.Context, in io.Reader, out io.Writer) error {
	s := &sink{}
	defer s.close()
	dec, enc := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var c command
		if err := dec.Decode(&c); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("copy: second process: %w", err)
		}
		var r reply
		if err := s.obey(ctx, &c, &r); err != nil {
			r.Err = err.Error()
		}
		if err := enc.Encode(&r); err != nil {
			return fmt.Errorf("copy: second process: %w", err)
		}
	}
}

func (s *sink) close() {
	if s.backend != nil {
		_ = s.backend.Close()
	}
	if s.plain != nil {
		_ = s.plain.Close()
	}
	s.wg.Wait()
	if s.region != nil {
		s.region.Release()
	}
}

func (s *sink) obey(ctx context.Context, c *command, r *reply) error {
	switch {
	case c.Setup != nil:
		r.Copies = mem.CopyChoices()
		return s.start(ctx, c.Setup, r)
	case c.Layout != nil:
		b, _ := s.region.Bytes()
		s.space = &space{region: s.region, bytes: b, block: c.Layout.Block, total: s.setup.Total,
			at: scatter(c.Layout.Block, s.setup.Total, c.Layout.Seed)}
		return nil
	case c.Open != nil:
		s.space.landed.Store(0)
		s.grant = &transport.Grant{Peer: s.setup.Parent, Slot: 1, Gen: c.Open.Gen, Memory: s.space,
			Landed: s.space.received}
		s.grant.Receipt.Reset(uint32(s.setup.Total / chunk))
		token, err := s.backend.Grant(s.grant)
		s.host.mu.Lock()
		s.host.grant = s.grant
		s.host.mu.Unlock()
		r.Token = token
		s.begun = cpuTime()
		return err
	case c.Plain:
		s.begun = cpuTime()
		return nil
	case c.Ended:
		r.CPU = cpuTime() - s.begun
		return nil
	case c.Check != nil:
		s.grant.Revoke()
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		if err := s.backend.Fence(ctx, s.grant); err != nil {
			return err
		}
		if n := s.space.landed.Load(); n != int64(s.setup.Total/chunk) {
			return fmt.Errorf("%d of %d chunks have landed", n, s.setup.Total/chunk)
		}
		r.Wrong = s.space.wrong(*c.Check)
		return nil
	case c.Verify != nil:
		b, _ := s.region.Bytes()
		flat := &space{bytes: b, block: chunk, total: s.setup.Total, at: contiguous(s.setup.Total)}
		r.Wrong = flat.wrong(*c.Verify)
		return nil
	}
	return errors.New("an empty command")
}

func contiguous(total int) []uint64 {
	at := make([]uint64, total/chunk)
	for i := range at {
		at[i] = uint64(i) * chunk
	}
	return at
}

func (s *sink) start(ctx context.Context, c *setup, r *reply) error {
	if s.backend != nil {
		return errors.New("set up twice")
	}
	s.setup = *c
	var err error
	if s.region, err = mem.MapMemfd(mem.NewID(), sinkFD, regionBytes, mem.Populate()); err != nil {
		return err
	}
	if s.backend, err = newBackend(c); err != nil {
		return err
	}
	s.host = newHost(transport.Peer{Boot: c.Parent, Self: c.Child, Key: c.Key}, nil)
	if r.Rails, err = s.backend.Open(ctx, s.host); err != nil {
		return err
	}
	if c.Transport != "tcp" {
		return nil
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s.plain = ln.(*net.TCPListener)
	r.Plain = ln.Addr().String()
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		for i := 0; ; i++ {
			conn, err := s.plain.Accept()
			if err != nil {
				return
			}
			s.wg.Add(1)
			go func() {
				defer s.wg.Done()
				s.drain(conn)
			}()
		}
	}()
	return nil
}

// drain is the receiving end of one connection of the tcp baseline: its share of the region, round
// after round.
func (s *sink) drain(c net.Conn) {
	defer func() { _ = c.Close() }()
	var index [1]byte
	if _, err := io.ReadFull(c, index[:]); err != nil || int(index[0]) >= s.setup.Conns {
		return
	}
	b, _ := s.region.Bytes()
	from, to := share(s.setup.Total, s.setup.Conns, int(index[0]))
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return
	}
	v := newVector(raw, false)
	for {
		for at := from; at < to; at += plainBytes {
			if err := v.all(b[at:min(at+plainBytes, to)]); err != nil {
				return
			}
		}
		if _, err := c.Write(index[:]); err != nil {
			return
		}
	}
}
