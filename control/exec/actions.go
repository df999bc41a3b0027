package exec

import (
	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/dest"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/exec/internal/layouts"
	"github.com/kvspray/kvspray/control/exec/internal/source"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/transfer"
	"github.com/kvspray/kvspray/transport"
)

// Kind is what an Action asks for.
type Kind uint8

// The actions, each with the fields of Action that it sets. The driver starts what may block and
// reports its end as an event; it does the rest before the next action.
const (
	// Connect(Endpoint) reaches a sidecar; PeerUp or ConnectFailed follows.
	Connect Kind = iota + 1
	// Send(Peer, Frame) puts the frame on the control lanes.
	Send
	// Offer(Peer, ReceiveParts, Frame) makes the grants of the parts live (Memory, Landed,
	// Host.Grant, backends), fills the tokens into the parts of the frame and sends it.
	Offer
	// Fence(ReceivePart, Cause) revokes the guard of the part at once, then fences it in every
	// backend; FenceDone follows.
	Fence
	// Forget(ReceivePart) drops the part from what Host.Grant finds.
	Forget
	// Follow(Worker, On) starts or ends the observation of the worker's layers: something is sent
	// from its memory.
	Follow
	// Bind(SendPart) makes the origin of the part live with its blocks as they are now.
	Bind
	// Update(SendPart, Blocks) gives the origin another block table.
	Update
	// CloseOrigin(SendPart, Committed) revokes the guard of the part at once, then closes it in every
	// backend; OriginClosed follows.
	CloseOrigin
	// Move(Lane, Slices) hands slices to a lane. Where that fails they come back through Results.
	Move
	// WakeHint(Lane) announces slices to the peer of the lane, a transport.WakeHinter.
	WakeHint
	// Ask(Lane) reads how many bytes of the lane the other host has received; Moved follows if there
	// are more.
	Ask
	// Measure() reads what came over each rail from each peer since the last one; Measured follows.
	Measure
	// LogViolation(Peer, Text) logs a violation, once for each peer and kind of Violation.
	LogViolation
	// HeldOn(Worker, Lease) reports to the engine that a source lease is still held, for a receiver
	// whose engine lives.
	HeldOn
	// Complete(Worker, Completion, Trace, ReceiveParts) ends a lease towards its engine. Trace is nil
	// for leases that were never matched. The parts are those of the last grant.
	Complete
	// Describe(Peer, Geometry) asks a peer for a layout; Described follows.
	Describe
	// Compare(Comparison) finds out in what two caches differ; Compared follows.
	Compare
	// Answer(Await, Admission) calls Await.Reply.
	Answer
	// WorkerFenced(Worker, Fenced) calls Fenced: the worker has no lease left.
	WorkerFenced
)

// Action is something that the driver must do. Its Kind names the fields that are set.
type Action struct {
	Kind         Kind
	On           bool
	Committed    bool // the receiver committed what was sent
	Cause        lease.Cause
	Peer         transfer.Boot
	Endpoint     string
	Text         string
	Geometry     [32]byte
	Frame        *peerv1.ControlFrame
	ReceivePart  *ReceivePart
	ReceiveParts []*ReceivePart
	SendPart     *SendPart
	Blocks       [][]uint32
	Comparison   Comparison
	Lane         uint64
	Slices       []transport.Slice // valid until the next Drain into the same Batch
	Worker       *engines.Worker
	Lease        uint64
	Completion   engines.Completion
	Trace        *Trace
	Await        *engines.Await
	Admission    engines.Admission
	Fenced       func()

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

func (c *actions) emit(a Action) { c.out = append(c.out, a) }

func (c *actions) Send(to transfer.Boot, f *peerv1.ControlFrame) {
	c.emit(Action{Kind: Send, Peer: to, Frame: f})
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
	c.emit(Action{Kind: Move, Lane: lane, first: len(c.outSlices), count: len(batch)})
	c.outSlices = append(c.outSlices, batch...)
}

func (c *actions) WakeHint(lane uint64) { c.emit(Action{Kind: WakeHint, Lane: lane}) }

func (c *actions) Ask(lane uint64) { c.emit(Action{Kind: Ask, Lane: lane}) }

func (c *actions) Measure() { c.emit(Action{Kind: Measure}) }

func (c *actions) LogViolation(peer transfer.Boot, text string) {
	c.emit(Action{Kind: LogViolation, Peer: peer, Text: text})
}

func (c *actions) Offer(to transfer.Boot, parts []*ReceivePart, f *peerv1.ControlFrame) {
	c.emit(Action{Kind: Offer, Peer: to, ReceiveParts: parts, Frame: f})
}

func (c *actions) Fence(p *ReceivePart, cause lease.Cause) {
	c.emit(Action{Kind: Fence, ReceivePart: p, Cause: cause})
}

func (c *actions) Forget(p *ReceivePart) { c.emit(Action{Kind: Forget, ReceivePart: p}) }

func (c *actions) Received(w *engines.Worker, end engines.Completion, trace *Trace,
	parts []*ReceivePart) {
	c.emit(Action{Kind: Complete, Worker: w, Completion: end, Trace: trace, ReceiveParts: parts})
}

func (c *actions) Sent(w *engines.Worker, end engines.Completion, trace *Trace) {
	c.emit(Action{Kind: Complete, Worker: w, Completion: end, Trace: trace})
}

func (c *actions) Answer(a *engines.Await, ad engines.Admission) {
	c.emit(Action{Kind: Answer, Await: a, Admission: ad})
}

func (c *actions) Bind(p *SendPart) { c.emit(Action{Kind: Bind, SendPart: p}) }

func (c *actions) Update(p *SendPart, blocks [][]uint32) {
	c.emit(Action{Kind: Update, SendPart: p, Blocks: blocks})
}

func (c *actions) CloseOrigin(p *SendPart, committed bool) {
	c.emit(Action{Kind: CloseOrigin, SendPart: p, Committed: committed})
}

func (c *actions) Follow(w *engines.Worker, on bool) {
	c.emit(Action{Kind: Follow, Worker: w, On: on})
}

func (c *actions) HeldOn(w *engines.Worker, lease uint64) {
	c.emit(Action{Kind: HeldOn, Worker: w, Lease: lease})
}

func (c *actions) Compare(x Comparison) { c.emit(Action{Kind: Compare, Comparison: x}) }

func (c *actions) connect(addr string) { c.emit(Action{Kind: Connect, Endpoint: addr}) }

func (c *actions) describe(name layouts.Name) {
	c.emit(Action{Kind: Describe, Peer: name.Boot, Geometry: name.Geometry})
}

func (c *actions) workerFenced(w *engines.Worker, done func()) {
	c.emit(Action{Kind: WorkerFenced, Worker: w, Fenced: done})
}

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
