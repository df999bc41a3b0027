package exec

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/control/exec/internal/agreement"
	"github.com/kvspray/kvspray/control/exec/internal/credit"
	"github.com/kvspray/kvspray/control/exec/internal/frame"
	"github.com/kvspray/kvspray/control/exec/internal/lanes"
	"github.com/kvspray/kvspray/control/lease"
	"github.com/kvspray/kvspray/control/spray"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/transfer"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// target is an executor with one open prompt and one lane to a peer that may send anything.
type target struct {
	ex    *Exec
	w     *engines.Worker
	peer  transfer.Boot
	batch Batch
}

const targetTokens = 256

func newTarget() *target { return newTargetFor(1) }

// newTargetFor returns a target whose prompt has fanout receivers.
func newTargetFor(fanout int) *target {
	tg := &target{ex: New(Config{Boot: transfer.Boot{1}, Endpoint: "p:1", Planner: simPlanner{},
		Transports: []string{"tcp"}, MaxPending: 8}), peer: transfer.Boot{9}}
	tg.w = &engines.Worker{Name: "w", Boot: transfer.Boot{2},
		Layout: &layout.Layout{Groups: []layout.Group{{TokensPerBlock: simBlock,
			Layers: make([]layout.Layer, simLayers)}}}}
	tg.ex.WorkerUp(tg.w)
	tg.ex.PeerUp(1, "", tg.peer)
	// a fresh peer has room
	_ = tg.ex.LaneUp(1, tg.peer, spray.LaneInfo{ID: 1,
		Path:       spray.Path{Transport: "tcp", Local: "r", Remote: "r"},
		SliceBytes: transfer.ChunkBytes, MaxSlices: 4}, false)
	tg.ex.Intent(1, tg.w, engines.Intent{Lease: transfer.LeaseID{Boot: tg.w.Boot, ID: 1, Epoch: 1},
		Key: testKey(1, 1), Tokens: targetTokens, Fanout: fanout, Deadline: 30 * sec})
	for l := range simLayers {
		tg.ex.Progress(1, tg.w, []engines.Progress{{Lease: transfer.LeaseID{Boot: tg.w.Boot, ID: 1},
			Layer: l, Tokens: targetTokens, Final: true}})
	}
	tg.drain()
	return tg
}

// drain performs the actions. It counts those that send bytes, and returns the replies.
func (tg *target) drain() (gives int, replies []*peerv1.GrantReply) {
	for tg.ex.Drain(&tg.batch) {
		for i := range tg.batch.Actions {
			switch a := &tg.batch.Actions[i]; a.Kind {
			case Bind, Update, Move, Offer:
				gives++
			case Send:
				if r := a.Frame.GetGrantReply(); r != nil {
					replies = append(replies, r)
				}
			}
		}
	}
	return gives, replies
}

// goodGrant is the grant of a correct receiver.
func goodGrant() *peerv1.Grant {
	k := testKey(1, 1)
	plan, err := newSimPlan(targetTokens, []uint32{0})
	if err != nil {
		panic(err)
	}
	sp, digest := plan.Space(), plan.Digest()
	return &peerv1.Grant{Xfer: k.Xfer[:], Hash: k.Hash[:],
		Destination: frame.Lease(transfer.LeaseID{Boot: transfer.Boot{7}, ID: 5, Epoch: 1}), Gen: 3,
		Tokens: targetTokens, Skip: []uint32{0}, Fingerprint: make([]byte, 32), Geometry: make([]byte,
			32), DeadlineMs: 10000, MatchTimeoutMs: 5000,
		Team: make([]byte, len(lease.TeamID{})), TeamSize: 1, PlanVersion: simPlanner{}.Version(),
		Parts: []*peerv1.Part{{Rank: engines.Place{}.Rank(), Geometry: make([]byte, 32), Slot: 7,
			Gen: 3, Chunks: sp.NumChunks(), Bytes: sp.TotalBytes(),
			Digest: digest[:]}}}
}

func grantFrame(g *peerv1.Grant) *peerv1.ControlFrame {
	return &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Grant{Grant: g}}
}

// Each of hostileGrants has one invalid field. code is the expected reply; UNKNOWN: none, the frame
// is a protocol violation.
var hostileGrants = map[string]struct {
	change func(*peerv1.Grant)
	code   peerv1.GrantReply_Code
	text   string
}{
	"no key":         {func(g *peerv1.Grant) { g.Xfer = nil }, 0, "xfer has 0 bytes"},
	"long key":       {func(g *peerv1.Grant) { g.Hash = make([]byte, 33) }, 0, "33"},
	"no destination": {func(g *peerv1.Grant) { g.Destination = nil }, 0, "boot has 0 bytes"},
	"short boot": {func(g *peerv1.Grant) { g.Destination.Boot = make([]byte, 15) }, 0,
		"boot has 15 bytes"},
	"generation 0": {func(g *peerv1.Grant) { g.Gen = 0 }, 0, "generation 0"},
	"no fingerprint": {func(g *peerv1.Grant) { g.Fingerprint = nil }, 0,
		"fingerprint of 0 bytes"},
	"no team":    {func(g *peerv1.Grant) { g.Team = nil }, 0, "team of 0 bytes"},
	"empty team": {func(g *peerv1.Grant) { g.TeamSize = 0 }, 0, "0 receivers"},
	"huge team": {func(g *peerv1.Grant) { g.TeamSize = 1 << 31 }, 0,
		"2147483648 receivers"},
	"no parts": {func(g *peerv1.Grant) { g.Parts = nil }, 0, "0 parts"},
	"too many parts": {func(g *peerv1.Grant) { g.Parts = make([]*peerv1.Part, frame.MaxParts+1) }, 0,
		"257 parts"},
	"team of 1 byte": {func(g *peerv1.Grant) { g.Team = g.Team[:1] }, 0, "team of 1 bytes"},
	"slot without bytes": {func(g *peerv1.Grant) {
		g.Parts[0] = &peerv1.Part{Rank: "pp0/tp0",
			Bytes: 1}
	}, 0, "parts[0].geometry"},
	"nil part": {func(g *peerv1.Grant) { g.Parts[0] = nil }, 0, "parts[0].rank"},
	"no rank":  {func(g *peerv1.Grant) { g.Parts[0].Rank = "" }, 0, "parts[0].rank"},
	"long rank": {func(g *peerv1.Grant) {
		g.Parts[0].Rank = strings.Repeat("r", frame.MaxRankBytes+1)
	}, 0, "parts[0].rank"},
	"rank twice": {func(g *peerv1.Grant) { g.Parts = append(g.Parts, g.Parts[0]) }, 0,
		"parts[1].rank"},
	"short geometry": {func(g *peerv1.Grant) { g.Parts[0].Geometry = make([]byte, 31) }, 0,
		"parts[0].geometry"},
	"slot without content": {func(g *peerv1.Grant) { g.Parts[0].Geometry = nil }, 0,
		"parts[0].geometry"},
	"slot of 17 bits": {func(g *peerv1.Grant) { g.Parts[0].Slot = 1 << 16 }, 0,
		"parts[0].slot = 65536"},
	"part of generation 0": {func(g *peerv1.Grant) { g.Parts[0].Gen = 0 }, 0, "generation 0"},
	"slot twice": {func(g *peerv1.Grant) {
		p := proto.Clone(g.Parts[0]).(*peerv1.Part)
		p.Rank = "pp1/tp0"
		g.Parts = append(g.Parts, p)
	}, 0, "parts[1].slot"},
	"long share": {func(g *peerv1.Grant) {
		g.Parts[0].Share = make([]uint32, 2*layout.MaxLayers+1)
	}, 0, "parts[0].share"},
	"more tokens": {func(g *peerv1.Grant) { g.Tokens *= 2 }, peerv1.GrantReply_PLAN,
		"tokens = 512 at the receiver, 256 at the source"},
	"more chunks": {func(g *peerv1.Grant) { g.Parts[0].Chunks++ }, peerv1.GrantReply_PLAN,
		"parts[pp0/tp0].chunks"},
	"no chunks": {func(g *peerv1.Grant) { g.Parts[0].Chunks = 0 }, peerv1.GrantReply_PLAN,
		"chunks = 0 at the receiver"},
	"all chunks": {func(g *peerv1.Grant) { g.Parts[0].Chunks = 1<<32 - 1 }, peerv1.GrantReply_PLAN,
		"chunks = 4294967295 at the receiver"},
	"more bytes": {func(g *peerv1.Grant) { g.Parts[0].Bytes = 1<<64 - 1 }, peerv1.GrantReply_PLAN,
		"bytes = 18446744073709551615 at the receiver"},
	"no plan version": {func(g *peerv1.Grant) { g.PlanVersion = 0 }, peerv1.GrantReply_PLAN,
		"plan_version = none at the receiver, 1 at the source: " +
			"upgrade the sidecar of the receiver (decode)"},
	"newer plans": {func(g *peerv1.Grant) { g.PlanVersion = 2 }, peerv1.GrantReply_PLAN,
		"plan_version = 2 at the receiver, 1 at the source: " +
			"upgrade the sidecar of the source (prefill)"},
	"no digest": {func(g *peerv1.Grant) { g.Parts[0].Digest = nil }, peerv1.GrantReply_PLAN,
		"parts[pp0/tp0].digest = "},
	"other digest": {func(g *peerv1.Grant) { g.Parts[0].Digest[0]++ }, peerv1.GrantReply_PLAN,
		"0101000000000000 at the receiver, 0001000000000000 at the source: " + agreement.SameRelease},
	"digest of 33 bytes": {func(g *peerv1.Grant) {
		g.Parts[0].Digest = append(g.Parts[0].Digest, 0)
	}, peerv1.GrantReply_PLAN, "parts[pp0/tp0].digest = "},
	"another skip": {func(g *peerv1.Grant) { g.Skip[0] = simBlock }, peerv1.GrantReply_PLAN,
		"parts[pp0/tp0].bytes"},
	"other geometry": {func(g *peerv1.Grant) { g.Parts[0].Geometry[0]++ },
		peerv1.GrantReply_RANKS, "another shape"},
	"unknown rank": {func(g *peerv1.Grant) { g.Parts[0].Rank = "pp9/tp9" },
		peerv1.GrantReply_RANKS, "other names"},
	"rank too many": {func(g *peerv1.Grant) {
		g.Parts = append(g.Parts, &peerv1.Part{Rank: "pp1/tp0"})
	}, peerv1.GrantReply_RANKS, "1 ranks"},
	"unlike teams":   {func(g *peerv1.Grant) { g.TeamSize = lease.MaxTeam + 1 }, 0, "team"},
	"other prompt":   {func(g *peerv1.Grant) { g.Hash[0]++ }, 0, ""}, // waits for its own
	"other transfer": {func(g *peerv1.Grant) { g.Xfer[0]++ }, 0, ""},
	"an empty grant": {func(g *peerv1.Grant) { proto.Reset(g) }, 0, "key"},
}

// The error of an invalid grant names the field: in the log for a protocol violation, or in the
// reply if the grant cannot be served. No byte is sent. The valid grant after it is served.
func TestHostileGrants(t *testing.T) {
	for name, c := range hostileGrants {
		t.Run(name, func(t *testing.T) {
			tg := newTarget()
			g := goodGrant()
			c.change(g)
			err := tg.ex.Message(2, tg.peer, grantFrame(g))
			gives, replies := tg.drain()
			if gives != 0 {
				t.Errorf("%d actions give bytes away", gives)
			}
			text := fmt.Sprint(err)
			switch {
			case c.code != 0:
				if len(replies) != 1 || replies[0].Code != c.code || err != nil {
					t.Fatalf("answered %v, %v: want %v", replies, err, c.code)
				}
				text = replies[0].Message
			case c.text == "":
				if err != nil || len(replies) != 0 {
					t.Fatalf("answered %v, %v", replies, err)
				}
			case err == nil || len(replies) != 0 || tg.ex.match.Counts().Grants != 0:
				t.Fatalf("%v, %d answers, %d grants are kept", err, len(replies), tg.ex.match.Counts().Grants)
			}
			if !strings.Contains(text, c.text) {
				t.Errorf("text %q, want %q in it", text, c.text)
			}
			good := goodGrant()
			good.Gen, good.Parts[0].Gen = 4, 4
			if err := tg.ex.Message(3, tg.peer, grantFrame(good)); err != nil {
				t.Fatal(err)
			}
			if gives, replies = tg.drain(); gives == 0 || len(replies) != 1 ||
				replies[0].Code != peerv1.GrantReply_BOUND {
				t.Errorf("the valid grant: %d actions, %v", gives, replies)
			}
		})
	}
}

// Each kind of protocol violation of a peer is logged once, and all are counted, for each peer by
// itself. Valid grants are served meanwhile.
func TestViolationsAreLoggedOnce(t *testing.T) {
	const frames = 1000
	tg := newTarget()
	noKey, noTeam, unnamed, revoke := goodGrant(), goodGrant(), goodGrant(),
		&peerv1.Revoke{Destination: &peerv1.Lease{Boot: []byte{1}}}
	noKey.Xfer, noTeam.TeamSize, unnamed.Parts[0].Rank = nil, 0, ""
	kinds := []struct {
		frame  *peerv1.ControlFrame
		text   string
		reason Violation
	}{
		{grantFrame(noKey), "grant: key: xfer has 0 bytes", frame.BadKey},
		{grantFrame(noTeam), "team of 16 bytes and 0 receivers", frame.BadTeam},
		{grantFrame(unnamed), `parts[0].rank = "": want each rank once`, frame.BadRank},
		{&peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{Revoke: revoke}}, "revoke: lease: boot " +
			"has 1 bytes", frame.BadLease},
	}
	for _, from := range []transfer.Boot{tg.peer, {99}} {
		logged := make([][]string, len(kinds))
		for i := range frames {
			for k := range kinds { // by turns: none is hidden by another
				if err := tg.ex.Message(Instant(i)*sec, from, kinds[k].frame); err != nil {
					logged[k] = append(logged[k], err.Error())
				}
			}
		}
		for k, x := range kinds {
			if len(logged[k]) != 1 || !strings.Contains(logged[k][0], x.text) {
				t.Errorf("%d invalid frames were logged %d times: %q, want %q once", frames, len(logged[k]),
					logged[k], x.text)
			}
		}
	}
	// Violations that LogViolation reports are logged and counted in the same way, each kind by
	// itself.
	invalid := &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Credit{Credit: &peerv1.Credit{
		Transport: "tcp", Rail: "r0", Bytes: credit.Max + 1}}}
	for i := range frames {
		if err := tg.ex.Message(Instant(frames+i)*sec, tg.peer, invalid); err != nil {
			t.Fatal(err)
		}
		tg.ex.PeerRails(Instant(frames+i)*sec, tg.peer, make([]Rail, lanes.MaxRails+1))
	}
	if logged := only(t, drained(tg.ex), LogViolation); len(logged) != 2 {
		t.Errorf("invalid credits and rails were logged %d times: %+v, want once each",
			len(logged), logged)
	}
	counts := tg.ex.Violations()
	for _, x := range kinds {
		if counts[x.reason.String()] != 2*frames {
			t.Errorf("%d frames with another %s were counted, want %d", counts[x.reason.String()],
				x.reason, 2*frames)
		}
	}
	for _, what := range []Violation{frame.BadCredit, frame.BadRails} {
		if counts[what.String()] != frames {
			t.Errorf("%d of %s were counted, want %d", counts[what.String()], what, frames)
		}
	}
	if !tg.ex.ReportViolation(tg.peer, frame.BadAddress) || tg.ex.ReportViolation(tg.peer,
		frame.BadAddress) ||
		tg.ex.ReportViolation(transfer.Boot{77}, frame.BadAddress) || tg.ex.Violations()["address"] != 3 {
		t.Errorf("addresses: %v, want the first of three to be logged, and none of an unknown peer",
			tg.ex.Violations())
	}
	names := map[string]bool{}
	for what := range frame.NumViolations {
		names[what.String()] = true
	}
	if len(names) != int(frame.NumViolations) || names[""] || frame.NumViolations > 32 {
		t.Errorf("%d kinds have the names %v", frame.NumViolations, names)
	}
	if gives, _ := tg.drain(); gives != 0 || tg.ex.match.Counts().Grants != 0 {
		t.Errorf("%d actions, %d grants are kept", gives, tg.ex.match.Counts().Grants)
	}
	if err := tg.ex.Message(1001*sec, tg.peer, grantFrame(goodGrant())); err != nil {
		t.Fatal(err)
	}
	if gives, replies := tg.drain(); gives == 0 || len(replies) != 1 ||
		replies[0].Code != peerv1.GrantReply_BOUND {
		t.Errorf("the valid grant: %d actions, %v", gives, replies)
	}
}

// Replayed frames, frames of an older generation, and frames about a lease that was not granted to
// their sender change nothing.
func TestReplaysAndStaleFrames(t *testing.T) {
	tg := newTarget()
	send := func(from transfer.Boot, f *peerv1.ControlFrame) (gives int,
		replies []*peerv1.GrantReply) {
		t.Helper()
		if err := tg.ex.Message(3, from, f); err != nil {
			t.Fatal(err)
		}
		return tg.drain()
	}
	if gives, replies := send(tg.peer, grantFrame(goodGrant())); gives == 0 || len(replies) != 1 {
		t.Fatalf("%d actions, %v", gives, replies)
	}
	sending := tg.ex.match.Sending()
	stale := goodGrant()
	stale.Gen = 2
	dest := frame.Lease(transfer.LeaseID{Boot: transfer.Boot{7}, ID: 5, Epoch: 1})
	other := frame.Lease(transfer.LeaseID{Boot: transfer.Boot{7}, ID: 6, Epoch: 1})
	older := frame.Lease(transfer.LeaseID{Boot: transfer.Boot{7}, ID: 5, Epoch: 0})
	newer := frame.Lease(transfer.LeaseID{Boot: transfer.Boot{7}, ID: 5, Epoch: 2})
	unknown := transfer.Boot{13}
	for name, f := range map[string]struct {
		from transfer.Boot
		f    *peerv1.ControlFrame
	}{
		"replay":           {tg.peer, grantFrame(goodGrant())},
		"stale generation": {tg.peer, grantFrame(stale)},
		"revoke of another peer": {unknown, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{
			Revoke: &peerv1.Revoke{Destination: dest, Gen: 3}}}},
		"commit of another peer": {unknown, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Commit{
			Commit: &peerv1.Commit{Destination: dest}}}},
		"commit of another": {tg.peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Commit{
			Commit: &peerv1.Commit{Destination: other}}}},
		"commit, epoch before": {tg.peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Commit{
			Commit: &peerv1.Commit{Destination: older}}}},
		"commit, epoch to come": {tg.peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Commit{
			Commit: &peerv1.Commit{Destination: newer}}}},
		"revoke, epoch before": {tg.peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{
			Revoke: &peerv1.Revoke{Destination: older, Gen: 3}}}},
		"revoke, epoch to come": {tg.peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{
			Revoke: &peerv1.Revoke{Destination: newer, Gen: 3}}}},
		"revoke, older grant": {tg.peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{
			Revoke: &peerv1.Revoke{Destination: dest, Gen: 2}}}},
		"reply to no grant": {tg.peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_GrantReply{
			GrantReply: &peerv1.GrantReply{Destination: dest, Source: dest,
				Code: peerv1.GrantReply_BOUND}}}},
		"loss of no grant": {tg.peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_SourceLost{
			SourceLost: &peerv1.SourceLost{Destination: dest, Final: true}}}},
		"answer to nothing": {tg.peer, &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Admitted{
			Admitted: &peerv1.Admitted{Token: 77}}}},
		"a frame of nothing": {tg.peer, &peerv1.ControlFrame{}},
	} {
		if gives, replies := send(f.from, f.f); gives != 0 || len(replies) != 0 {
			t.Errorf("%s: %d actions, %v", name, gives, replies)
		}
		if len(sending) != 1 || !slices.Equal(tg.ex.match.Sending(), sending) ||
			tg.ex.match.Counts().Grants != 1 {
			t.Fatalf("%s: the transfer under way is gone", name)
		}
	}
	// A second receiver of the same source, beyond the fan-out of the intent, waits and receives
	// nothing.
	more := goodGrant()
	more.Destination.Id, more.Team[0], more.Parts[0].Slot = 8, 1, 9
	if gives, replies := send(tg.peer, grantFrame(more)); gives != 0 || len(replies) != 0 {
		t.Errorf("a receiver too many: %d actions, %v", gives, replies)
	}
}

// A source serves two receivers. A replay of the first grant after its commit takes no place.
func TestReplayOfAGrantThatIsOver(t *testing.T) {
	tg := newTargetFor(2)
	send := func(f *peerv1.ControlFrame) (gives int, replies []*peerv1.GrantReply) {
		t.Helper()
		if err := tg.ex.Message(3, tg.peer, f); err != nil {
			t.Fatal(err)
		}
		return tg.drain()
	}
	first := goodGrant()
	if gives, replies := send(grantFrame(first)); gives == 0 || len(replies) != 1 {
		t.Fatalf("%d actions, %v", gives, replies)
	}
	send(&peerv1.ControlFrame{Body: &peerv1.ControlFrame_Commit{Commit: &peerv1.Commit{
		Destination: first.Destination}}})
	if gives, replies := send(grantFrame(first)); gives != 0 || len(replies) != 0 ||
		tg.ex.match.Counts().Grants != 0 {
		t.Errorf("the replay: %d actions, %v, %d grants", gives, replies, tg.ex.match.Counts().Grants)
	}
	second := goodGrant()
	second.Destination.Id, second.Team[0], second.Parts[0].Slot = 8, 1, 9
	if gives, replies := send(grantFrame(second)); gives == 0 || len(replies) != 1 ||
		replies[0].Code != peerv1.GrantReply_BOUND {
		t.Errorf("the second receiver: %d actions, %v", gives, replies)
	}
}

// Grants and queries for prompts that never come are bounded.
func TestWaitingIsBounded(t *testing.T) {
	tg := newTarget()
	refused := 0
	for i := range 100 {
		g := goodGrant()
		g.Xfer[3], g.Destination.Id = byte(i), uint64(100+i)
		g.Xfer[0]++
		if err := tg.ex.Message(2, tg.peer, grantFrame(g)); err != nil {
			t.Fatal(err)
		}
		_, replies := tg.drain()
		for _, r := range replies {
			if r.Code == peerv1.GrantReply_LIMIT {
				refused++
			}
		}
	}
	if refused != 92 || tg.ex.match.Counts().Grants != 8 || tg.ex.match.Counts().WaitingKeys != 8 {
		t.Errorf("%d refused, %d kept, %d wait: want 92, 8, 8", refused, tg.ex.match.Counts().Grants,
			tg.ex.match.Counts().WaitingKeys)
	}
}

// So are grants that wait for a comparison or for a layout.
func TestAskingIsBounded(t *testing.T) {
	for name, change := range map[string]func(*target, *peerv1.Grant){
		"fingerprint": func(_ *target, g *peerv1.Grant) { g.Fingerprint[0] = 9 },
		"layout":      func(tg *target, _ *peerv1.Grant) { tg.ex.core.Cfg.Planner = asking{} },
	} {
		tg := newTarget()
		for i := range 100 {
			g := goodGrant()
			g.Destination.Id, g.Team[0] = uint64(100+i), byte(i)
			change(tg, g)
			if err := tg.ex.Message(2, tg.peer, grantFrame(g)); err != nil {
				t.Fatal(err)
			}
			tg.drain()
		}
		if n := tg.ex.match.Counts().Grants; n != 8 || tg.ex.peers.Find(tg.peer).Pending != 8 {
			t.Errorf("%s: %d grants are kept, %d count: want 8", name, n, tg.ex.peers.Find(tg.peer).Pending)
		}
		for _, c := range tg.ex.match.Comparing() {
			tg.ex.Compared(3, c, "so")
		}
		tg.ex.Described(3, tg.peer, [32]byte{1}, errors.New("no such layout"))
		tg.drain()
		if n := tg.ex.match.Counts().Grants; n != 0 || tg.ex.peers.Find(tg.peer).Pending != 0 {
			t.Errorf("%s: %d grants are left, %d count", name, n, tg.ex.peers.Find(tg.peer).Pending)
		}
	}
}

// Two engines may have the same name. A grant is for the ranks that have an intent of its key,
// independent of the order of maps.
func TestEnginesOfOneName(t *testing.T) {
	for range 20 {
		tg := newTarget()
		for i := range 8 {
			tg.ex.WorkerUp(&engines.Worker{Boot: transfer.Boot{3, byte(i)}, Geometry: [32]byte{byte(i)},
				Layout: tg.w.Layout})
		}
		if err := tg.ex.Message(2, tg.peer, grantFrame(goodGrant())); err != nil {
			t.Fatal(err)
		}
		if _, replies := tg.drain(); len(replies) != 1 || replies[0].Code != peerv1.GrantReply_BOUND {
			t.Fatalf("answered %v", replies)
		}
	}
}

// maxOfAFrame bounds the memory that parsing and handling a frame of n bytes may allocate: for a
// served grant, whose plan is small here, and for what protobuf makes of the bytes. That is largest
// for repeated empty messages (dearFrames).
func maxOfAFrame(n int) uint64 { return 16<<10 + 128*uint64(n) }

// dearFrames are the frames that need the most memory for their bytes.
func dearFrames() map[string][]byte {
	field := func(m proto.Message, name protoreflect.Name, v []byte) []byte {
		num := m.ProtoReflect().Descriptor().Fields().ByName(name).Number()
		return protowire.AppendBytes(protowire.AppendTag(nil, num, protowire.BytesType), v)
	}
	body := func(name protoreflect.Name, v []byte) []byte {
		return field(&peerv1.ControlFrame{}, name, v)
	}
	fill := func(one []byte) []byte { return bytes.Repeat(one, (60<<10)/len(one)) }
	budget := field(&peerv1.Part{}, "tokens_by_transport", nil)
	return map[string][]byte{
		"parts":              body("grant", fill(field(&peerv1.Grant{}, "parts", nil))),
		"parts with budgets": body("grant", fill(field(&peerv1.Grant{}, "parts", budget))),
		"budgets": body("grant",
			field(&peerv1.Grant{}, "parts", bytes.Repeat(budget, 30<<10))),
		"skip":      body("grant", field(&peerv1.Grant{}, "skip", make([]byte, 60<<10))),
		"distances": body("grant", fill(field(&peerv1.Grant{}, "distances", nil))),
		"ranks":     body("grant_reply", fill(field(&peerv1.GrantReply{}, "ranks", nil))),
		"rails":     body("rails", fill(field(&peerv1.Rails{}, "rails", nil))),
		"addresses": body("rails", fill(field(&peerv1.Rails{}, "control_addresses", nil))),
	}
}

// TestExpensiveFrames checks the bound of FuzzMessage against the frames that determine it.
func TestExpensiveFrames(t *testing.T) {
	for name, b := range dearFrames() {
		tg := newTarget()
		read := func() {
			var fr peerv1.ControlFrame
			if err := proto.Unmarshal(b, &fr); err != nil || fr.Body == nil {
				t.Fatalf("%s: %v", name, err)
			}
			_ = tg.ex.Message(1, tg.peer, &fr)
			tg.drain()
		}
		testutil.AllocatesAtMost(t, maxOfAFrame(len(b)), name, read)
		n := testutil.Allocates(read)
		t.Logf("%s: %d bytes became %d, %.1f for each; at most %d", name, len(b), n,
			float64(n)/float64(len(b)), maxOfAFrame(len(b)))
	}
}

// FuzzMessage sends any frames, with two bytes for the length of each. The executor does not panic,
// its tables and allocations stay bounded, and a refused frame causes no byte to be sent.
func FuzzMessage(f *testing.F) {
	add := func(frames ...*peerv1.ControlFrame) {
		var b []byte
		for _, fr := range frames {
			raw, err := proto.Marshal(fr)
			if err != nil {
				f.Fatal(err)
			}
			if len(raw) < 1<<16 {
				b = append(append(b, byte(len(raw)), byte(len(raw)>>8)), raw...)
			}
		}
		f.Add(b)
	}
	for _, c := range hostileGrants {
		g := goodGrant()
		c.change(g)
		if g.Parts == nil || g.Parts[0] != nil {
			add(grantFrame(g), grantFrame(goodGrant()))
		}
	}
	dest := goodGrant().Destination
	add(grantFrame(goodGrant()), &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Revoke{
		Revoke: &peerv1.Revoke{Destination: dest, Gen: 3}}})
	add(grantFrame(goodGrant()), &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Commit{
		Commit: &peerv1.Commit{Destination: dest}}})
	add(&peerv1.ControlFrame{Body: &peerv1.ControlFrame_Await{Await: &peerv1.Await{
		Xfer: goodGrant().Xfer, Hash: goodGrant().Hash, Token: 1}}})
	add(&peerv1.ControlFrame{Body: &peerv1.ControlFrame_Credit{Credit: &peerv1.Credit{Transport: "tcp",
		Rail: "r", Bytes: 1}}})
	for _, b := range dearFrames() {
		f.Add(append([]byte{byte(len(b)), byte(len(b) >> 8)}, b...))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		tg := newTarget()
		frames := 0
		for len(b) >= 2 && frames < 64 {
			n := min(int(b[0])|int(b[1])<<8, len(b)-2)
			var fr peerv1.ControlFrame
			var err error
			var gives int
			var replies []*peerv1.GrantReply
			testutil.AllocatesAtMost(t, maxOfAFrame(n), fmt.Sprintf("a frame of %d bytes", n), func() {
				if proto.Unmarshal(b[2:2+n], &fr) == nil {
					frames++
					err = tg.ex.Message(Instant(frames)*sec/10, tg.peer, &fr)
					gives, replies = tg.drain()
				}
			})
			for _, r := range replies {
				if err != nil && r.Code == peerv1.GrantReply_BOUND {
					t.Fatalf("refused (%v) and bound", err)
				}
			}
			if err != nil && gives != 0 {
				t.Fatalf("refused (%v), and %d actions give bytes away", err, gives)
			}
			b = b[2+n:]
		}
		if n := tg.ex.match.Counts().Grants; n > frames || tg.ex.match.Counts().WaitingKeys > 8 ||
			tg.ex.dests.Len() != 0 || tg.ex.layouts.Len()+len(tg.ex.match.Comparing()) > frames ||
			tg.ex.peers.Len() > 2 {
			t.Fatalf("%d frames: %d grants, %d keys wait, %d destinations, %d descriptions, %d peers",
				frames, n, tg.ex.match.Counts().WaitingKeys, tg.ex.dests.Len(),
				tg.ex.layouts.Len()+len(tg.ex.match.Comparing()), tg.ex.peers.Len())
		}
		// Everything ends after its time.
		tg.ex.Tick(frame.MaxDeadline + 60*sec)
		tg.drain()
		if n := tg.ex.match.Counts().WaitingKeys; n != 0 {
			t.Fatalf("%d keys wait forever", n)
		}
	})
}
