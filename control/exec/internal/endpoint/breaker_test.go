package endpoint

import (
	"errors"
	"testing"
	"time"
)

// A breaker is stale some time after the last request, and its spans are bounded.
func TestBreakersAreForgotten(t *testing.T) {
	var b breaker
	hang := errors.New("no answer")
	now := Instant(time.Second)
	for range 3 {
		b.failed(now, hang)
		now += 5 * time.Second
	}
	if b.refuses(now-5*time.Second) == "" {
		t.Error("closed after ten time.Secondonds of failures")
	}
	spans := []time.Duration{b.span}
	for range 6 {
		now = b.open
		if b.refuses(now) != "" {
			t.Error("open beyond its time")
		}
		b.failed(now, hang)
		b.failed(now+1, hang) // a try for earlier requests changes nothing
		spans = append(spans, b.span)
	}
	if spans[0] != breakFirst || spans[1] != 2*breakFirst || spans[6] != BreakMax {
		t.Errorf("spans %v", spans)
	}
	if b.until() <= b.open {
		t.Error("forgotten while it is open")
	}
}
