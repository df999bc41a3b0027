package trace

import (
	"strconv"
	"testing"

	"github.com/kvspray/kvspray/internal/nodeapi"
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

// TestFind: the number of records is bounded. Find reports since when all are kept.
func TestFind(t *testing.T) {
	var l Lines
	fits := func(e *nodeapi.Record) bool { return e.Req == "0" || e.Req == "1" }
	for i := range maxKept {
		l.Put(Transfer{Outcome: "ok", Req: strconv.Itoa(i)})
	}
	l.Put(Copy{Outcome: "failed", Req: "1"})
	if got, _ := l.Find(fits); len(got) != 3 || got[0].Side != "" || got[0].Outcome != "failed" {
		t.Errorf("%+v", got)
	}
	l.Put(Transfer{Outcome: "ok", Req: "last"})
	got, since := l.Find(fits)
	if len(got) != 2 || got[1].Req != "1" || got[1].Outcome != "ok" || !since.Equal(got[1].At) {
		t.Errorf("since %v: %+v", since, got)
	}
	if n := len(l.Recent()); n != maxRecent+1 {
		t.Errorf("%d are listed", n)
	}
}
