package gossip

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"google.golang.org/protobuf/proto"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/cluster"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
)

const patience = time.Minute

// poll waits for a condition that no event announces.
func poll(t testing.TB, what string, ok func() bool) {
	t.Helper()
	end := time.Now().Add(patience)
	for tick := time.NewTicker(time.Millisecond); !ok(); <-tick.C {
		if time.Now().After(end) {
			tick.Stop()
			t.Fatalf("not in time: %s", what)
		}
	}
}

func begun(t *testing.T, key []byte, join ...string) *Gossip {
	t.Helper()
	m := cluster.Member{Node: t.Name(), Endpoint: "127.0.0.1:1", Version: "test"}
	copy(m.Boot[:], fmt.Sprint(time.Now().UnixNano()))
	o := Options{Listen: "127.0.0.1:0", Join: join, Log: slog.New(slog.DiscardHandler)}
	if key != nil {
		o.Keys = [][]byte{key}
	}
	g, err := Start(o, m, admit.NewMembers())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := g.Leave(); err != nil {
			t.Error(err)
		}
	})
	return g
}

// TestPublish: what one member serves reaches the others, which notify their users.
func TestPublish(t *testing.T) {
	a := begun(t, nil)
	b := begun(t, nil, a.Address())
	poll(t, "two members", func() bool { return len(a.Members()) == 2 && len(b.Members()) == 2 })
	changed := a.Changed()
	b.Publish([]string{"vllm/x/0"}, []string{"store"})
	serves := func(m cluster.Member) bool {
		return m.Has("store") && slices.Equal(m.Engines, []string{"vllm/x/0"}) && m.Version == "test"
	}
	poll(t, "the engine is published", func() bool { return slices.ContainsFunc(a.Members(), serves) })
	<-changed

	// What does not fit is left out, from the end.
	var many []string
	for i := range 100 {
		many = append(many, fmt.Sprintf("vllm/engine-%d/%s", i, strings.Repeat("x", 20)))
	}
	b.Publish(many, []string{"store"})
	poll(t, "engines that fit", func() bool {
		return slices.ContainsFunc(a.Members(), func(m cluster.Member) bool {
			return m.Has("store") && len(m.Engines) > 3 && len(m.Engines) < 20 &&
				slices.Equal(m.Engines, many[:len(m.Engines)])
		})
	})
}

// TestForeignMetadata: the lists of members are bounded.
func TestForeignMetadata(t *testing.T) {
	long := strings.Repeat("v", cluster.MaxNameBytes+1)
	in := &peerv1.Member{Boot: make([]byte, 16), Release: long, Labels: []string{long},
		Engines: []string{long}}
	for i := range 1000 {
		in.Labels, in.Engines = append(in.Labels, fmt.Sprint("l", i)), append(in.Engines, fmt.Sprint(i))
	}
	b, err := proto.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	m, _, ok := decode(b)
	if !ok || m.Version != "" || len(m.Labels) != cluster.MaxLabels || m.Labels[0] != "l0" ||
		len(m.Engines) != cluster.MaxEngines || m.Engines[0] != "0" {
		t.Errorf("%t, %+v", ok, m)
	}
	if m, _, ok := decode(nil); ok {
		t.Errorf("without a boot: %+v", m)
	}
}

func TestNameTooLong(t *testing.T) {
	_, err := Start(Options{Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler)},
		cluster.Member{Boot: transfer.Boot{1}, Node: strings.Repeat("n", memberlist.MetaMaxSize)},
		admit.NewMembers())
	if err == nil || !strings.Contains(err.Error(), "shorten node") {
		t.Error(err)
	}
	_, err = Start(Options{Listen: "0.0.0.0:0", Log: slog.New(slog.DiscardHandler)},
		cluster.Member{}, admit.NewMembers())
	if !errors.Is(err, ErrUnsafe) {
		t.Error(err)
	}
}

// A member that cannot be joined is tried beside those that can, and logged once, as is that it is
// joined.
func TestMissedMember(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		var log bytes.Buffer
		start := time.Now()
		var asked []string
		ask := func(_ context.Context, a string) error {
			asked = append(asked, a)
			switch since := time.Since(start); {
			case a == "late:1" && since < joinPatience/2, a == "dead:1" && since < 10*time.Minute:
				return errors.New("no member there")
			}
			return nil
		}
		var missed [][]string
		joinAll(t.Context(), Options{Join: []string{"up:1", "late:1", "dead:1"},
			Log: slog.New(slog.NewTextHandler(&log, nil)), Missed: func(a []string) {
				if len(missed) == 0 || !slices.Equal(a, missed[len(missed)-1]) {
					missed = append(missed, a)
				}
			}}, ask)
		if len(missed) != 3 || len(missed[0])+len(missed[2]) > 0 ||
			!slices.Equal(missed[1], []string{"dead:1"}) {
			t.Errorf("missed: %v", missed)
		}
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		if len(lines) != 2 || !strings.Contains(lines[0], "level=WARN") || !strings.Contains(lines[0],
			"join=dead:1") || !strings.Contains(lines[0], "peer.gossip.join") ||
			!strings.Contains(lines[1], "level=INFO") || !strings.Contains(lines[1], "join=dead:1") {
			t.Errorf("%s", &log)
		}
		if n := time.Since(start); n < 10*time.Minute || n > 11*time.Minute {
			t.Errorf("it was joined after %v", n)
		}
		ups := len(slices.DeleteFunc(slices.Clone(asked), func(a string) bool { return a != "up:1" }))
		if ups != 1 || len(asked) > 100 {
			t.Errorf("one that answered was asked %d times, and all were asked %d times", ups, len(asked))
		}
	})
}

// Nothing is logged, and nothing waited for, once the node ends.
func TestMissedMemberEnds(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		var log bytes.Buffer
		ctx, stop := context.WithTimeout(t.Context(), 2*joinPatience)
		defer stop()
		ask := func(ctx context.Context, _ string) error {
			<-ctx.Done()
			return ctx.Err()
		}
		start := time.Now()
		joinAll(ctx, Options{Join: []string{"a:1", "b:1"}, Log: slog.New(slog.NewTextHandler(&log,
			nil))}, ask)
		if took := time.Since(start); took != 2*joinPatience || log.Len() > 0 {
			t.Errorf("it took %v, logged %s", took, &log)
		}
	})
}
