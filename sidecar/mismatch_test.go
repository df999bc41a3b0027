package sidecar

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/connector/connectortest"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/sidecar/internal/plans"
	"github.com/kvspray/kvspray/sidecar/internal/trace"
)

func startLogged(t testing.TB) (*running, *testutil.Log) {
	t.Helper()
	l := &testutil.Log{}
	cfg := testConfig(t, func(c *config.Config) { c.Transports.Order = []string{"tcp"} })
	return startLog(t, cfg, slog.New(slog.NewTextHandler(l, nil))), l
}

// Every field in which two engines differ is named with both values: to the decode engine, in the
// trace line, and in the log of either side. The peer is asked once.
func TestMismatchIsNamed(t *testing.T) {
	p, plog := startLogged(t)
	d, dlog := startLogged(t)
	pe := newEngine(t, p, testShape)
	de := engineOf(t, d, testShape, func(l *layout.Layout) {
		l.DType, l.Identity = "float16", connectortest.Identity(parseblock.IdentityRope, "2e6")
	})
	ask := func() string {
		pr := newPrompt(64)
		src, err := pe.Intent(msg.Intent{Xfer: pr.xfer, Hash: pr.hash, Tokens: 64, Fanout: 1,
			Blocks: [][]uint32{{1, 2, 3, 4}}, Ready: 64, DeadlineMS: deadlineMS})
		dst, err2 := de.Expect(msg.Expect{Xfer: pr.xfer, Hash: pr.hash, Tokens: 64, Peer: p.Endpoint(),
			Skip: []uint32{0}, Blocks: [][]uint32{{5, 6, 7, 8}},
			DeadlineMS: deadlineMS, MatchTimeoutMS: matchMS})
		if err != nil || err2 != nil {
			t.Fatal(err, err2)
		}
		c := de.wait(dst)
		if c.Status != engines.StatusRefused {
			t.Fatalf("status %d, %+v", c.Status, c.Received)
		}
		if err := pe.Cancel(src, "test", true); err != nil {
			t.Fatal(err)
		}
		pe.wait(src)
		return c.Received.Reason
	}
	const want = `dtype: "bfloat16" at prefill, "float16" at decode; ` +
		`identity.rope: "10000" at prefill, "2e6" at decode`
	if got := ask(); got != "fingerprint: "+want {
		t.Errorf("reason %q, want %q", got, want)
	}
	for _, l := range []*testutil.Log{plog, dlog} {
		until(t, func() bool { return strings.Contains(strings.ReplaceAll(l.String(), `\"`, `"`), want) })
	}
	// The sidecar uses the description that it remembers.
	p.conv.descriptions.mu.Lock()
	if len(p.conv.descriptions.byFingerprint) != 1 {
		t.Errorf("%d descriptions are remembered", len(p.conv.descriptions.byFingerprint))
	}
	for k := range p.conv.descriptions.byFingerprint {
		p.conv.descriptions.byFingerprint[k] = parseblock.Description{{Name: "remembered", Value: "yes"}}
	}
	p.conv.descriptions.mu.Unlock()
	if got := ask(); !strings.Contains(got, `remembered: missing at prefill, "yes" at decode`) {
		t.Errorf("the peer was asked again: %q", got)
	}
	until(t, func() bool {
		b, err := os.ReadFile(d.cfg.Trace.Transfers)
		if err != nil {
			t.Fatal(err)
		}
		var r trace.Transfer
		line, _, _ := strings.Cut(string(b), "\n")
		return json.Unmarshal([]byte(line), &r) == nil && r.Reason == "fingerprint: "+want
	})
}

// Where the pages are unlike, too, the cells of layers are named with the rest, each field once for
// all layers; and where the models are alike otherwise, the error of the plan names the cells.
func TestUnlikeCellsAreNamed(t *testing.T) {
	const cells = "kv heads = 1 and 2"
	for _, c := range []struct {
		name, rope string
		want       []string
	}{
		{"with the identity", "2e6", []string{"fingerprint: ",
			`identity.rope: "10000" at prefill, "2e6" at decode`,
			`k heads: "1" at prefill, "2" at decode, in layer "layers.0" and 3 more`,
			`k bytes of a head of a token: "512" at prefill, "256" at decode, ` +
				`in layer "layers.0" and 3 more`}},
		{"alone", "", []string{`layer "layers.0" and 3 more: ` + cells, "kv bytes of a head of a token " +
			"= 1024 and 512"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, d := pairOf(t, "tcp")
			pe := newEngine(t, p, testShape)
			de := engineOf(t, d, testShape, func(l *layout.Layout) {
				l.Groups[0].Params = map[string]int64{"heads": 2}
				if c.rope != "" {
					l.Identity = connectortest.Identity(parseblock.IdentityRope, c.rope)
				}
			})
			pr := newPrompt(64)
			src, err := pe.Intent(msg.Intent{Xfer: pr.xfer, Hash: pr.hash, Tokens: 64, Fanout: 1,
				Blocks: [][]uint32{{1, 2, 3, 4}}, Ready: 64, DeadlineMS: deadlineMS})
			dst, err2 := de.Expect(msg.Expect{Xfer: pr.xfer, Hash: pr.hash, Tokens: 64, Peer: p.Endpoint(),
				Skip: []uint32{0}, Blocks: [][]uint32{{5, 6, 7, 8}},
				DeadlineMS: deadlineMS, MatchTimeoutMS: matchMS})
			if err != nil || err2 != nil {
				t.Fatal(err, err2)
			}
			got := de.wait(dst)
			if got.Status == engines.StatusOK {
				t.Fatal("unlike caches were moved")
			}
			for _, w := range c.want {
				if !strings.Contains(got.Received.Reason, w) {
					t.Errorf("reason %q, want %q", got.Received.Reason, w)
				}
			}
			if err := pe.Cancel(src, "test", true); err != nil {
				t.Fatal(err)
			}
			pe.wait(src)
		})
	}
}

// A peer that describes something else than it was asked for is not believed.
func TestDescriptionMustHash(t *testing.T) {
	reg := parseblock.Default()
	p := newDescriptions(plans.New(reg))
	l := testShape.Layout()
	b, err := l.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	fp, err := reg.Fingerprint(l)
	if err != nil {
		t.Fatal(err)
	}
	for name, ask := range map[string][2][32]byte{"geometry": {{1}, fp},
		"fingerprint": {l.Geometry(), {1}}} {
		if _, err := p.learn(ask[0], ask[1], b); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("another %s: %v", name, err)
		}
	}
	if _, err := p.learn(l.Geometry(), fp, b); err != nil {
		t.Error(err)
	}
	if _, ok := p.of(fp); !ok || len(p.byFingerprint) != 1 {
		t.Errorf("%d descriptions", len(p.byFingerprint))
	}
}

func TestSentenceIsBounded(t *testing.T) {
	var fields []string
	for i := range 64 {
		fields = append(fields, fmt.Sprintf("identity.f%02d: %s", i, strings.Repeat("é", 600)))
	}
	got := sentence(fields)
	left := 64 - strings.Count(got, "identity.")
	if len(got) > maxDifferenceBytes+32 || left == 64 || !strings.HasSuffix(got,
		fmt.Sprintf("; and %d more", left)) {
		t.Errorf("%d bytes, %d fields left out: ...%s", len(got), left, got[len(got)-40:])
	}
	if got := sentence(fields[:1]); strings.Contains(got, "more") || len(got) > maxFieldBytes+3 {
		t.Errorf("one field: %d bytes", len(got))
	}
}
