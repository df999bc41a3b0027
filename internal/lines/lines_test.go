package lines

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
)

// A destination that takes nothing for a while holds up no writer. Lines beyond the bound are
// counted, the others arrive whole and in order.
func TestStalledDestination(t *testing.T) {
	t.Parallel()
	testutil.Bubble(t, func(t *testing.T) {
		r, w := io.Pipe()
		lost := 0
		l := New(w, func(n int) { lost += n }, nil)
		line := strings.Repeat("x", 999) + "\n"
		start := time.Now()
		const sent = 2*MaxQueued/1000 + 100
		for range sent {
			if n, err := l.Write([]byte(line)); n != len(line) || err != nil {
				t.Fatal(n, err)
			}
		}
		if l.Flush(0) || l.Flush(time.Second) {
			t.Error("all is written before a read")
		}
		if took := time.Since(start); took != time.Second {
			t.Errorf("took %v", took)
		}
		got := make(chan []byte)
		go func() {
			b, _ := io.ReadAll(r)
			got <- b
		}()
		if !l.Flush(time.Second) {
			t.Error("not written although a reader reads")
		}
		_ = l.Close()
		_ = w.Close()
		b := <-got
		arrived := bytes.Count(b, []byte("\n"))
		if len(b)%len(line) != 0 || arrived*len(line) != len(b) {
			t.Errorf("%d bytes with %d lines", len(b), arrived)
		}
		if lost == 0 || arrived+lost != sent {
			t.Errorf("%d arrived and %d are lost of %d", arrived, lost, sent)
		}
	})
}

// Close waits for lines, but not for ever. Later lines are dropped.
func TestClose(t *testing.T) {
	t.Parallel()
	testutil.Bubble(t, func(t *testing.T) {
		var b bytes.Buffer
		l := New(&b, nil, nil)
		_, _ = l.Write([]byte("one\n"))
		_ = l.Close()
		_, _ = l.Write([]byte("two\n"))
		if b.String() != "one\n" {
			t.Errorf("%q", b.String())
		}
		r, w := io.Pipe()
		l = New(w, nil, nil)
		_, _ = l.Write([]byte("one\n"))
		start := time.Now()
		_ = l.Close()
		if took := time.Since(start); took != FlushTime {
			t.Errorf("Close took %v", took)
		}
		_ = r.Close()
	})
}

// A Write that is larger than the queue is taken by an empty one. One that is refused counts each
// of its lines.
func TestLargeWrite(t *testing.T) {
	t.Parallel()
	testutil.Bubble(t, func(t *testing.T) {
		r, w := io.Pipe()
		lost := 0
		l := New(w, func(n int) { lost += n }, nil)
		large := bytes.Repeat([]byte("line\n"), MaxQueued/5+1)
		for range 3 { // one is being written, one waits, one is refused
			_, _ = l.Write(large)
			synctest.Wait()
		}
		got := make(chan int)
		go func() {
			b, _ := io.ReadAll(r)
			got <- len(b)
		}()
		_ = l.Close()
		_ = w.Close()
		if n := <-got; n != 2*len(large) || lost != MaxQueued/5+1 {
			t.Errorf("%d bytes of %d arrived, and %d lines are lost", n, 3*len(large), lost)
		}
	})
}

// brief is a destination that has room for some bytes.
type brief struct {
	bytes.Buffer
	room int
}

func (d *brief) Write(p []byte) (int, error) {
	n, _ := d.Buffer.Write(p[:min(len(p), d.room)])
	d.room -= n
	if n < len(p) {
		return n, io.ErrShortWrite
	}
	return n, nil
}

// Lines that a full destination refuses are counted, and the next line does not go on behind half
// of one.
func TestFullDestination(t *testing.T) {
	t.Parallel()
	testutil.Bubble(t, func(t *testing.T) {
		d := &brief{room: 12}
		lost, failed := 0, 0
		l := New(d, func(n int) { lost += n }, func(error) { failed++ })
		write := func(s string) {
			_, _ = l.Write([]byte(s))
			l.Flush(time.Second)
		}
		write("first\nsecond\nthird\n")
		write("fourth\n")
		d.room = 100
		write("fifth\n")
		d.room = 0
		write("sixth\n")
		_ = l.Close()
		if got := d.String(); got != "first\nsecond\nfifth\n" {
			t.Errorf("%q", got)
		}
		if lost != 3 || failed != 2 {
			t.Errorf("%d lines reported as lost, want 3; %d errors, want 2", lost, failed)
		}
	})
}

// Lines that arrive while the Writer closes are still written.
func TestLostBeforeClose(t *testing.T) {
	t.Parallel()
	testutil.Bubble(t, func(t *testing.T) {
		r, w := io.Pipe()
		var l *Writer
		l = New(w, func(int) { _, _ = l.Write([]byte("lost\n")) }, nil)
		_, _ = l.Write([]byte("one\n"))
		synctest.Wait()
		_, _ = l.Write(make([]byte, MaxQueued))
		_, _ = l.Write([]byte("two\n"))
		got := make(chan []byte)
		go func() {
			b, _ := io.ReadAll(r)
			got <- b
		}()
		_ = l.Close()
		_ = w.Close()
		if b := <-got; !bytes.HasSuffix(b, []byte("lost\n")) {
			t.Errorf("%d bytes end with %q", len(b), b[max(0, len(b)-10):])
		}
	})
}

// Flush does not wait for what others write meanwhile.
func TestFlushAmongWriters(t *testing.T) {
	t.Parallel()
	testutil.Bubble(t, func(t *testing.T) {
		r, w := io.Pipe()
		l := New(w, nil, nil)
		b := make([]byte, 4)
		_, _ = l.Write([]byte("one\n"))
		synctest.Wait()
		flushed := make(chan bool)
		go func() { flushed <- l.Flush(time.Second) }()
		synctest.Wait()
		_, _ = l.Write([]byte("two\n"))
		_, _ = io.ReadFull(r, b)
		if !<-flushed {
			t.Error("Flush waited for a later line")
		}
		_ = r.Close()
		_ = l.Close()
	})
}

// An error of the destination is reported once.
func TestError(t *testing.T) {
	t.Parallel()
	testutil.Bubble(t, func(t *testing.T) {
		r, w := io.Pipe()
		want := errors.New("disk full")
		_ = r.CloseWithError(want)
		var got []error
		l := New(w, nil, func(err error) { got = append(got, err) })
		for range 3 {
			_, _ = l.Write([]byte("line\n"))
			l.Flush(time.Second)
		}
		_ = l.Close()
		if len(got) != 1 || !errors.Is(got[0], want) {
			t.Errorf("%v", got)
		}
	})
}
