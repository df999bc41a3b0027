package lane

import (
	"net"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/control/peer/frame"
	"github.com/kvspray/kvspray/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// deadlines is the connection of a lane. It records the last deadline for writes.
type deadlines struct {
	net.Conn
	mu   sync.Mutex
	set  int
	last time.Time
}

func (d *deadlines) SetWriteDeadline(t time.Time) error {
	d.mu.Lock()
	d.set, d.last = d.set+1, t
	d.mu.Unlock()
	return d.Conn.SetWriteDeadline(t)
}

// After a backlog no deadline of the writer is left, which would end the lane later.
func TestLaneAfterBacklog(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	far, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	l, err := New(c, nil, "")
	if err != nil {
		t.Fatal(err)
	}
	d := &deadlines{Conn: c}
	l.conn, l.limit = d, time.Minute
	sent := 0
	for l.Backlog() == 0 { // until the socket is full
		b := make([]byte, frame.Max)
		if !l.Write(b) {
			t.Fatal("the lane has ended")
		}
		sent += len(b)
	}
	buf := make([]byte, 1<<20)
	for sent > 0 {
		n, err := far.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		sent -= n
	}
	l.wg.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.set < 2 || !d.last.IsZero() {
		t.Errorf("%d deadlines were set, the last one is %v: want one or more, and then none",
			d.set, d.last)
	}
	if !l.Write([]byte{1}) {
		t.Fatalf("the lane has ended: %v", l.Err())
	}
}
