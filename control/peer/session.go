package peer

import (
	"crypto/rand"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/kvspray/kvspray/control/peer/delivery"
	"github.com/kvspray/kvspray/control/peer/hello"
	"github.com/kvspray/kvspray/transfer"
)

// incarnation distinguishes the sessions of one side with a boot.
type incarnation [16]byte

// session is the state with one other process: its handshake, and whether it is up. The channel has
// the lanes and the frames.
type session struct {
	boot        transfer.Boot
	source      netip.Prefix // of its first Hello
	incarnation incarnation  // of this side
	channel     *delivery.Channel

	life sync.Mutex // serializes PeerUp and PeerDown; while it is held no lane is added

	mu         sync.Mutex // protects all below
	id         hello.Identity
	info       Peer     // its Endpoint is where this process dialed, if ever
	claimed    string   // endpoint that the peer claims
	addrs      []string // control addresses of the peer
	ups        int      // number of PeerUp events
	reportedAs string   // the endpoint in the last PeerUp
	up         bool     // PeerUp was the last event
	dialing    bool     // a goroutine reconnects
	dialed     bool     // this side opened it, so this side reopens it
	lastDial   time.Time
	proved     bool // a lane was open once, and theirs is valid
	theirs     incarnation
	// the peer's incarnation because of which the session before this one ended; nil: it did not
	renewedFor *incarnation
	member     bool // gossip lists it

	railsLogged bool // a message about the peer's rails
}

// newSession makes a session without lanes.
func newSession(boot transfer.Boot, c caller, channel *delivery.Channel) (*session, error) {
	s := &session{boot: boot, id: c.id, source: c.source, channel: channel}
	if _, err := rand.Read(s.incarnation[:]); err != nil {
		return nil, fmt.Errorf("peer: session: %w", err)
	}
	return s, nil
}

// endpoint is where to call the peer.
func (s *session) endpoint() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.endpointLocked()
}

func (s *session) endpointLocked() string {
	if s.info.Endpoint != "" {
		return s.info.Endpoint
	}
	return s.claimed
}

// Key implements opening.Session: a boot belongs to the certificate with which it came.
func (s *session) Key(id hello.Identity) (key [32]byte, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.info.Key, s.id == id
}

// Attachment implements opening.Session.
func (s *session) Attachment() []byte { return s.incarnation[:] }

// endDialing ends what a true dialing stands for.
func (s *session) endDialing() {
	s.mu.Lock()
	s.dialing = false
	s.mu.Unlock()
}

// setDialed makes this side reopen the session.
func (s *session) setDialed() {
	s.mu.Lock()
	s.dialed = true
	s.mu.Unlock()
}

// target is a control address of a peer; index is its place among them.
type target struct {
	addr  string
	index int
}

// missingLocked is the control addresses without a lane.
func (s *session) missingLocked() (out []target) {
	lanes := s.channel.Lanes()
	for i, a := range s.addrs {
		if !slices.ContainsFunc(lanes, func(l delivery.Lane) bool { return l.Address() == a }) {
			out = append(out, target{a, i})
		}
	}
	return out
}

// unused reports whether s has no lane, and no frame that a proved peer has not acknowledged: a
// Commit among them would be lost, and the source's blocks kept until a deadline.
func (s *session) unused() bool {
	st := s.channel.State()
	s.mu.Lock()
	defer s.mu.Unlock()
	return st.Lanes == 0 && (!s.proved || st.Unacked == 0)
}

// quiet reports whether no frame was sent or received for a while.
func (s *session) quiet(after time.Duration) bool {
	st := s.channel.State()
	return !st.Closed && st.Unacked+st.Held == 0 && time.Since(st.Active) > after
}
