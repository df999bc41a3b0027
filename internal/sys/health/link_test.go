package health

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// wire is a link with counters, and its verdict.
type wire struct {
	t   *testing.T
	l   Link
	now time.Time
	s   Sample
}

func newWire(t *testing.T) *wire {
	w := &wire{t: t, now: time.Unix(1e9, 0), s: Sample{Up: true}}
	w.l.Look(w.now, w.s)
	return w
}

// run moves packets for some seconds, with errors and retransmissions in each.
func (w *wire) run(seconds int, packets, errors, resent uint64) {
	for range seconds {
		w.now = w.now.Add(time.Second)
		w.s.Packets += packets
		w.s.Sent += packets
		w.s.Errors += errors
		w.s.Resent += resent
		w.l.Look(w.now, w.s)
	}
}

func (w *wire) flap() {
	w.s.Losses++
	w.s.Up = false
	w.l.Look(w.now, w.s)
	w.s.Up = true
	w.l.Look(w.now, w.s)
}

func (w *wire) want(what string, kind Kind) {
	w.t.Helper()
	if f := w.l.Fault(); f.Kind != kind {
		w.t.Fatalf("%s: %+v, want kind %q", what, f, kind)
	}
}

// TestErrorsRise: errors beyond the bound exclude a link within two readings; few do not, and one
// bad reading does not. The link comes back after a time without errors, and after a longer one if
// the errors return with the traffic.
func TestErrorsRise(t *testing.T) {
	w := newWire(t)
	w.run(60, 1e6, 9, 0)
	w.want("few errors", "")
	w.run(60, 1e6, 50, 0)
	w.want("a small share of errors", "")
	w.run(1, 1e6, 500, 0)
	w.want("one bad reading", "")
	w.run(1, 1e6, 0, 0)
	w.run(1, 1e6, 500, 0)
	w.want("bad readings apart", "")
	w.run(1, 1e6, 500, 0)
	w.want("two in a row", Errors)
	hold := firstHold
	for range 10 {
		w.run(int(hold/time.Second)-1, 0, 0, 0)
		w.want("still waiting", Errors)
		w.run(2, 0, 0, 0)
		w.want("tried again", "")
		w.run(2, 1e6, 500, 0)
		w.want("the errors return", Errors)
		hold = min(2*hold, longestHold)
	}
	w.run(int(longestHold/time.Second)+1, 0, 0, 0)
	w.run(int(forgiven*longestHold/time.Second), 1e6, 0, 0)
	w.run(2, 1e6, 500, 0)
	w.run(int(firstHold/time.Second), 0, 0, 0)
	w.want("after a long time without a fault the first wait is short", "")
}

func TestResends(t *testing.T) {
	w := newWire(t)
	w.run(60, 1e6, 0, 1000)
	w.want("a switch drops packets", "")
	w.run(2, 1e6, 0, 20000)
	w.want("hardly a packet arrives", Resends)
}

// TestFlaps: a link that loses its carrier now and then is used at once when it is back. One that
// flaps is not, until it was quiet for a time, and each loss begins that time again.
func TestFlaps(t *testing.T) {
	w := newWire(t)
	for range 20 {
		w.flap()
		w.run(int(flapWindow/time.Second)/2+1, 1e6, 0, 0)
		w.want("a loss now and then", "")
	}
	w.run(int(flapWindow/time.Second)+1, 1e6, 0, 0)
	w.flap()
	w.flap()
	w.want("twice", "")
	w.flap()
	w.want("flaps", Flaps)
	for range 10 {
		w.run(int(firstHold/time.Second)-1, 0, 0, 0)
		w.flap()
		w.want("a loss in the quiet time", Flaps)
	}
	w.s.Up = false
	w.run(3600, 0, 0, 0)
	w.want("an hour without a carrier", Flaps)
	w.s.Up = true
	w.run(1, 0, 0, 0)
	w.want("quiet and up", "")
}

// Counters that begin again at 0 with a new driver are no errors, and none of 2^64 events.
func TestCountersBeginAgain(t *testing.T) {
	w := newWire(t)
	w.run(10, 1e6, 9, 0)
	w.s = Sample{Up: true}
	w.run(3, 100, 0, 0)
	w.want("a new driver", "")
}

// TestCounters reads a tree like that of sysfs: of an interface with RDMA, of one whose counters
// are malformed, and of one that does not exist.
func TestCounters(t *testing.T) {
	root := t.TempDir()
	put := func(path, text string) {
		t.Helper()
		file := filepath.Join(root, "sys/class", path)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for i, name := range []string{"carrier_down_count", "statistics/rx_packets",
		"statistics/tx_packets", "statistics/rx_errors", "statistics/tx_errors"} {
		put("net/a/"+name, fmt.Sprintln(1<<i))
		put("net/b/"+name, "-17 apples and a very long text that no kernel would write here\n")
	}
	for i, name := range []string{"counters/port_xmit_packets", "counters/port_rcv_packets",
		"counters/symbol_error", "counters/local_link_integrity_errors", "hw_counters/packet_seq_err",
		"hw_counters/local_ack_timeout_err"} {
		put("infiniband/m/ports/1/"+name, fmt.Sprintln(100<<i))
	}
	got := Counters(root, true, []Port{{NIC: "a", RDMA: "m"}, {NIC: "b"}, {NIC: "none", RDMA: "x"}})
	want := Sample{Up: true, Losses: 1, Packets: 2 + 4 + 100 + 200, Errors: 8 + 16 + 400 + 800,
		Sent: 100, Resent: 1600 + 3200}
	if got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}
