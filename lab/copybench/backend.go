package copybench

import (
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/shm"
	"github.com/kvspray/kvspray/transport/tcp"
)

// setup is what the parent sends the child at the start.
type setup struct {
	Transport string
	CRC32C    bool
	AEAD      bool
	Conns     int
	Slice     int
	Window    int
	Total     int
	Parent    transfer.Boot
	Child     transfer.Boot
	Key       [32]byte
}

func newBackend(s *setup) (transport.Backend, error) {
	switch s.Transport {
	case tcp.Name:
		return tcp.New(tcp.Config{CRC32C: s.CRC32C, AEAD: s.AEAD, SliceBytes: s.Slice,
			MaxInFlight: max(s.Window, 16)})
	case "shm":
		return shm.New(shm.Config{Workers: s.Conns}), nil
	}
	return nil, fmt.Errorf("transport %q", s.Transport)
}

// host is the transport.Host of either process: one peer, one slot.
type host struct {
	peer transport.Peer
	ups  chan transport.Lane
	done func(transport.Lane, []transport.Result)

	mu      sync.Mutex
	grant   *transport.Grant
	origin  *transport.Origin
	refused map[transfer.Reason]int
	down    error
}

func newHost(peer transport.Peer, done func(transport.Lane, []transport.Result)) *host {
	return &host{peer: peer, done: done, ups: make(chan transport.Lane, maxConns),
		refused: map[transfer.Reason]int{}}
}

func (h *host) PeerKey(boot transfer.Boot) (transport.Peer, bool) {
	return h.peer,
		boot == h.peer.Boot
}

func (h *host) Grant(_ transfer.Boot, _ transfer.Slot, gen transfer.Gen) (*transport.Grant,
	transfer.Reason) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.grant == nil {
		return nil, transfer.ReasonUnknownSlot
	}
	if h.grant.Gen != gen {
		return nil, transfer.ReasonStaleGen
	}
	return h.grant, transfer.ReasonNone
}

func (h *host) Origin(_ transfer.Boot, _ transfer.Slot, gen transfer.Gen) (*transport.Origin,
	transfer.Reason) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.origin == nil {
		return nil, transfer.ReasonUnknownSlot
	}
	if h.origin.Gen != gen {
		return nil, transfer.ReasonStaleGen
	}
	return h.origin, transfer.ReasonNone
}

func (h *host) LaneUp(l transport.Lane) { h.ups <- l }

func (h *host) LaneDown(_ transport.Lane, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.down = err
}

func (h *host) Done(l transport.Lane, res []transport.Result) {
	if h.done != nil {
		h.done(l, res)
	}
}

func (h *host) Refused(_ transport.Lane, r transfer.Reason) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.refused[r]++
}

// sample is one round of either way.
type sample struct{ wall, cpu time.Duration }

// cpuTime is what this process has used.
func cpuTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
