package exec

import (
	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/dest"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/layouts"
	"github.com/kvspray/kvspray/control/exec/internal/source"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Kind is what an Action asks for.
type Kind uint8

// The actions. The driver starts what may block and reports its end as an event; it does the rest
// before the next action.
const (
	// Connect reaches Endpoint; PeerUp or ConnectFailed follows.
	Connect Kind = iota + 1
	// Send puts Frame on the control lanes to Peer.
	Send
	// Offer makes the grants of ReceiveParts live (Memory, Landed, Host.Grant, backends), fills the
	// tokens into their parts and sends Frame to Peer.
	Offer
	// Fence revokes the guard of ReceivePart at once, then fences it in every backend; FenceDone
	// follows.
	Fence
	// Forget drops ReceivePart from what Host.Grant finds.
	Forget
	// Follow starts (On) or ends the observation of Worker's layers: something is sent from its
	// memory.
	Follow
	// Bind makes SendPart's origin live with its blocks as they are now.
	Bind
	// Update gives SendPart's origin the block table Blocks.
	Update
	// CloseOrigin revokes the guard of SendPart at once, then closes it in every backend; OriginClosed
	// follows.
	CloseOrigin
	// Move hands Slices to lane Lane. Where that fails the slices come back through Results.
	Move
	// WakeHint announces slices to the peer of Lane, a transport.WakeHinter.
	WakeHint
	// Ask reads how many bytes of Lane the other host has received; Moved follows if there are more.
	Ask
	// Measure reads what came over each rail from each peer since the last one; Measured follows.
	Measure
	// LogViolation logs Text, once for each peer and kind of Violation.
	LogViolation
	// HeldOn reports to the engine of Worker that the source lease Held is still held, for a receiver
	// whose engine lives.
	HeldOn
	// Complete ends a lease towards the engine of Worker; ReceiveParts are those of its last grant.
	Complete
	// Describe asks Peer for the layout behind Geometry; Described follows.
	Describe
	// Compare finds out in what the caches of Comparison differ; Compared follows.
	Compare
	// Answer answers the Await of that Token.
	Answer
	// WorkerFenced reports that Worker has no lease left.
	WorkerFenced
)

// Action is something that the driver must do. Which fields are set depends on Kind.
type Action struct {
	Kind         Kind
	Peer         transfer.Boot
	Endpoint     string
	Frame        *peerv1.ControlFrame
	ReceivePart  *ReceivePart
	ReceiveParts []*ReceivePart
	Geometry     [32]byte
	Comparison   Comparison
	SendPart     *SendPart
	Blocks       [][]uint32
	Cause        Cause // Fence: why
	Committed    bool  // CloseOrigin: the receiver committed what was sent
	Lane         uint64
	Slices       []transport.Slice // valid until the next Drain into the same Batch
	Worker       *engines.Worker
	On           bool // Follow
	Held         uint64
	Completion   engines.Completion
	Trace        *Trace // Complete: set for leases that got as far as a partner
	Text         string // LogViolation
	Await        uint64
	Admission    engines.Admission

	first, count int // of Slices in the batch, until Drain
}

// Batch carries actions out of the executor; its memory is reused.
type Batch struct {
	Actions []Action
	slices  []transport.Slice
}

// actions are those of the current event. It implements what the parts ask of the driver.
type actions struct {
	out       []Action
	late      []Action // follow what the event moves
	outSlices []transport.Slice
}

// The parts and what they ask for.
var (
	_ lanes.Actions  = (*actions)(nil)
	_ dest.Actions   = (*actions)(nil)
	_ source.Actions = (*actions)(nil)
)

// emit appends an action and returns it for its fields to be set.
func (c *actions) emit(k Kind) *Action {
	c.out = append(c.out, Action{Kind: k})
	return &c.out[len(c.out)-1]
}

func (c *actions) Send(to transfer.Boot, f *peerv1.ControlFrame) {
	a := c.emit(Send)
	a.Peer, a.Frame = to, f
}

func (c *actions) SendLate(to transfer.Boot, f *peerv1.ControlFrame) {
	c.late = append(c.late, Action{Kind: Send, Peer: to, Frame: f})
}

// flushLate emits the actions that follow what this event moves.
func (c *actions) flushLate() {
	if len(c.late) > 0 {
		c.out = append(c.out, c.late...)
		clear(c.late)
		c.late = c.late[:0]
	}
}

func (c *actions) Move(lane uint64, batch []transport.Slice) {
	a := c.emit(Move)
	a.Lane, a.first, a.count = lane, len(c.outSlices), len(batch)
	c.outSlices = append(c.outSlices, batch...)
}

func (c *actions) WakeHint(lane uint64) { c.emit(WakeHint).Lane = lane }

func (c *actions) Ask(lane uint64) { c.emit(Ask).Lane = lane }

func (c *actions) Measure() { c.emit(Measure) }

func (c *actions) LogViolation(peer transfer.Boot, text string) {
	a := c.emit(LogViolation)
	a.Peer, a.Text = peer, text
}

func (c *actions) Offer(to transfer.Boot, parts []*ReceivePart, f *peerv1.ControlFrame) {
	a := c.emit(Offer)
	a.Peer, a.ReceiveParts, a.Frame = to, parts, f
}

func (c *actions) Fence(p *ReceivePart, cause Cause) {
	a := c.emit(Fence)
	a.ReceivePart, a.Cause = p, cause
}

func (c *actions) Forget(p *ReceivePart) { c.emit(Forget).ReceivePart = p }

func (c *actions) Received(w *engines.Worker, end engines.Completion, trace *Trace,
	parts []*ReceivePart) {
	a := c.emit(Complete)
	a.Worker, a.Completion, a.Trace, a.ReceiveParts = w, end, trace, parts
}

func (c *actions) Sent(w *engines.Worker, end engines.Completion, trace *Trace) {
	a := c.emit(Complete)
	a.Worker, a.Completion, a.Trace = w, end, trace
}

func (c *actions) Answer(query uint64, ad engines.Admission) {
	a := c.emit(Answer)
	a.Await, a.Admission = query, ad
}

func (c *actions) Bind(p *SendPart) { c.emit(Bind).SendPart = p }

func (c *actions) Update(p *SendPart, blocks [][]uint32) {
	a := c.emit(Update)
	a.SendPart, a.Blocks = p, blocks
}

func (c *actions) CloseOrigin(p *SendPart, committed bool) {
	a := c.emit(CloseOrigin)
	a.SendPart, a.Committed = p, committed
}

func (c *actions) Follow(w *engines.Worker, on bool) {
	a := c.emit(Follow)
	a.Worker, a.On = w, on
}

func (c *actions) HeldOn(w *engines.Worker, lease uint64) {
	a := c.emit(HeldOn)
	a.Worker, a.Held = w, lease
}

func (c *actions) Compare(x Comparison) { c.emit(Compare).Comparison = x }

func (c *actions) connect(addr string) { c.emit(Connect).Endpoint = addr }

func (c *actions) describe(name layouts.Name) {
	a := c.emit(Describe)
	a.Peer, a.Geometry = name.Boot, name.Geometry
}

func (c *actions) workerFenced(w *engines.Worker) { c.emit(WorkerFenced).Worker = w }

// drain is Exec.Drain.
func (c *actions) drain(b *Batch) bool {
	if len(c.out) == 0 {
		b.Actions = b.Actions[:0]
		return false
	}
	clear(b.Actions)
	b.Actions, c.out = c.out, b.Actions[:0]
	b.slices, c.outSlices = c.outSlices, b.slices[:0]
	for i := range b.Actions {
		if a := &b.Actions[i]; a.Kind == Move {
			a.Slices = b.slices[a.first : a.first+a.count : a.first+a.count]
		}
	}
	return true
}
