package progress

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
)

// Elsewhere than on a terminal: a line for each phase, and a reminder in a long one.
func TestLines(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		var b bytes.Buffer
		l := Start(&b)
		l.Phase("measuring rail%d", 0)
		<-time.After(time.Second)
		l.Phase("moving")
		<-time.After(5 * time.Second)
		l.Note("%d of 9", 3)
		<-time.After(9 * time.Second)
		l.Print("moved")
		<-time.After(time.Minute)
		l.Close()
		if want := "measuring rail0\nmoving\nmoving: 3 of 9 (9s)\nmoved\n"; b.String() != want {
			t.Errorf("%q, want %q", b.String(), want)
		}
	})
}

// On a terminal: one line that is drawn over, never longer than the terminal is wide, and gone at
// the end.
func TestTerminal(t *testing.T) {
	testutil.Bubble(t, func(t *testing.T) {
		var b bytes.Buffer
		l := start(&b, func() int { return 21 })
		l.Phase("moving")
		<-time.After(1200 * time.Millisecond)
		l.Note("3 of 9 now")
		<-time.After(500 * time.Millisecond)
		l.Note("a very long word about it")
		<-time.After(500 * time.Millisecond)
		l.End()
		<-time.After(time.Minute)
		l.Close()
		want := strings.Join([]string{"", "moving", "moving", "moving (1s)", "mov: 3 of 9 now (1s)",
			": a very long word a", ""}, eraseLine)
		if b.String() != want {
			t.Errorf("%q, want %q", b.String(), want)
		}
	})
}

func TestNoTerminal(t *testing.T) {
	f, err := os.Create(t.TempDir() + "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if terminal(f) != nil {
		t.Error("a file is no terminal")
	}
	var none *Line // prints nothing, and fails at nothing
	none.Phase("x")
	none.Note("x")
	none.Print("x")
	none.End()
	none.Close()
}
