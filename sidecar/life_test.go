package sidecar

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/msg"
)

// ahead moves the clock of the mark.
func (l *life) ahead(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	was := l.now
	l.now = func() time.Time { return was().Add(d) }
}

// The mark ends by itself: no operator has to undo a drain that failed or was killed.
func TestLeaveEnds(t *testing.T) {
	l := newLife()
	at := time.Unix(1000, 0)
	l.now = func() time.Time { return at }
	left := func(want time.Duration) {
		t.Helper()
		if got := l.Leaving(); got != want {
			t.Errorf("the mark lasts for %v, want %v", got, want)
		}
	}
	left(0)
	l.Leave(true)
	l.ahead(leaveFor - 1)
	left(1)
	l.Leave(true)
	left(leaveFor) // renewed
	l.ahead(leaveFor)
	left(0)
	l.Leave(true)
	l.Leave(false)
	left(0)
}

// An engine that comes back gets requests at once. One that drains registers at a sidecar that has
// restarted, and still leaves.
func TestNewEngineEndsTheMark(t *testing.T) {
	p, _ := pairOf(t, "tcp")
	leaving := func(want bool) {
		t.Helper()
		if _, body := get(t, p, "/v1/node"); !strings.Contains(body, fmt.Sprintf(`"leaving": %v`, want)) {
			t.Errorf("want leaving %v: %s", want, body)
		}
	}
	p.Leave(true)
	newEngine(t, p, testShape)
	leaving(true)
	p.ahead(renewed)
	leaving(true)
	newEngine(t, p, testShape)
	leaving(false)
}

// A drain has to wait for blocks that no receiver has fetched yet.
func TestSourceLeasesAreCounted(t *testing.T) {
	p, d := pairOf(t, "tcp")
	pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
	x := begin(t, p, pe, de, 1, 0, msg.PendingStep{Step: 1, End: tokens})
	count := func(want int) {
		t.Helper()
		until(t, func() bool {
			_, body := get(t, p, "/v1/node")
			return strings.Contains(body, fmt.Sprintf(`"source_leases": %d`, want))
		})
	}
	count(1)
	if n := d.SourceLeases(); n != 0 {
		t.Errorf("the receiver has %d source leases", n)
	}
	for l := range testShape.Layers {
		pe.SignalLayer(l, 1)
	}
	pe.SignalStep(1)
	de.ok(x.dst)
	pe.ok(x.src)
	count(0)
}
