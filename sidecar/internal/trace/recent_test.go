package trace

import (
	"strconv"
	"testing"
)

// TestRecent: many transfers that end well push no failure out, and the newest come first.
func TestRecent(t *testing.T) {
	var l Lines
	l.Put(Transfer{Outcome: "expired", Req: "lost"})
	for i := range 3 * maxRecent {
		l.Put(Copy{Outcome: "ok", Req: strconv.Itoa(i)}, PageHash{})
	}
	got := l.Recent()
	if len(got) != maxRecent+1 {
		t.Fatalf("%d are kept", len(got))
	}
	for i, e := range got[:maxRecent] {
		if want := strconv.Itoa(3*maxRecent - 1 - i); e.Req != want {
			t.Errorf("%d: %q, want %q", i, e.Req, want)
		}
	}
	if e := got[maxRecent]; e.Req != "lost" || e.At.IsZero() {
		t.Errorf("%+v", e)
	}
}
