package layouts

import (
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/exec/internal/core"
	"github.com/kvspray/kvspray/transfer"
)

// A layout is asked for once, again after a silence until the match timeout, and no more once it is
// done; the questions are bounded.
func TestAsk(t *testing.T) {
	var asked []Name
	c := &core.Core{Cfg: core.Config{MatchTimeout: time.Second}}
	tb := New(c, func(n Name) { asked = append(asked, n) })
	name := Name{Boot: transfer.Boot{1}}
	for range 2 {
		if !tb.Ask(0, name) || len(asked) != 1 {
			t.Fatalf("asked %d times", len(asked))
		}
	}
	if !tb.Again(0, name) || c.Agenda.Next() != Retry {
		t.Errorf("next question at %v", c.Agenda.Next())
	}
	c.Agenda.Pop(Retry).Value(Retry)
	if len(asked) != 2 || tb.Again(time.Second, name) {
		t.Errorf("asked %d times, and again after the match timeout", len(asked))
	}
	if !tb.Done(name) || tb.Done(name) || c.Agenda.Len() != 0 {
		t.Error("a question outlives its end")
	}
	for i := range maxAsked {
		name.Geometry[0], name.Geometry[1] = byte(i), byte(i>>8)
		if !tb.Ask(0, name) {
			t.Fatalf("only %d questions", i)
		}
	}
	if tb.Ask(0, Name{}) || tb.Len() != maxAsked || len(tb.Of(transfer.Boot{1})) != maxAsked {
		t.Errorf("%d questions: want %d at most", tb.Len(), maxAsked)
	}
}
