// SPDX-License-Identifier: Apache-2.0

package lines

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A destination that takes nothing for a while holds up nobody. Lines beyond the bound are counted,
// the others arrive whole and in order.
func TestStalledDestination(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
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
			t.Error("nobody reads, and all is written")
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
			t.Error("not written, and somebody reads")
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
	synctest.Test(t, func(t *testing.T) {
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

// An error of the destination is reported once.
func TestError(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
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
