// Package progress shows what a command is doing, so that nothing is silent
// for long. It writes to one place, standard error as a rule: results go elsewhere and stay clean.
//
// On a terminal it is one line that is drawn again and again and is gone at the end; elsewhere a
// line for each phase, and one now and then within a long one. A nil Line prints nothing.
//
// Goroutines: one, from Start to Close.
package progress

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// How often a phase that goes on is mentioned again.
const (
	redraw = 500 * time.Millisecond // on a terminal
	remind = 10 * time.Second       // elsewhere
)

const eraseLine = "\r\x1b[K"

// Line is what is being done.
type Line struct {
	w     io.Writer
	width func() int // of a terminal; nil where w is none

	stop chan struct{}
	wg   sync.WaitGroup

	mu    sync.Mutex // protects all below
	phase string
	note  string
	began time.Time
	drawn bool // the line stands on the terminal
}

// Start begins with an empty line.
func Start(w io.Writer) *Line { return start(w, terminal(w)) }

func start(w io.Writer, width func() int) *Line {
	l := &Line{w: w, width: width, stop: make(chan struct{})}
	every := remind
	if width != nil {
		every = redraw
	}
	l.wg.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				l.mu.Lock()
				l.drawLocked()
				l.mu.Unlock()
			case <-l.stop:
				return
			}
		}
	})
	return l
}

// terminal returns the width of w, or nil where it is none that lines can be redrawn on.
func terminal(w io.Writer) func() int {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return nil
	}
	width := func() int {
		size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
		if err != nil {
			return 0
		}
		return int(size.Col)
	}
	if width() == 0 {
		return nil
	}
	return width
}

// Phase shows what begins now. It ends the phase before.
func (l *Line) Phase(format string, args ...any) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.phase, l.note, l.began = fmt.Sprintf(format, args...), "", time.Now()
	l.drawLocked()
}

// Note records how far the phase is. It is shown when the phase is mentioned next.
func (l *Line) Note(format string, args ...any) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.note = fmt.Sprintf(format, args...)
}

// Print writes a line that stays. It ends the phase.
func (l *Line) Print(format string, args ...any) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.endLocked()
	l.write(fmt.Sprintf(format, args...) + "\n")
}

// End ends the phase: nothing is printed until the next one, and other code may write to the
// terminal.
func (l *Line) End() {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.endLocked()
}

// Close ends the phase and the goroutine. Once.
func (l *Line) Close() {
	if l == nil {
		return
	}
	close(l.stop)
	l.wg.Wait()
	l.End()
}

func (l *Line) endLocked() {
	l.phase = ""
	if l.drawn {
		l.write(eraseLine)
		l.drawn = false
	}
}

func (l *Line) drawLocked() {
	if l.phase == "" {
		return
	}
	phase, far := l.phase, ""
	if l.note != "" {
		far = ": " + l.note
	}
	if d := time.Since(l.began).Truncate(time.Second); d > 0 {
		far += fmt.Sprintf(" (%s)", d)
	}
	if l.width == nil {
		l.write(phase + far + "\n")
		return
	}
	// A line that wraps could not be drawn over. What changes is worth more than what was there to be
	// read before.
	limit := max(l.width()-1, 0)
	phase = phase[:min(len(phase), max(limit-len(far), 0))]
	l.write(eraseLine + phase + far[:min(len(far), limit)])
	l.drawn = true
}

// write ignores errors: no result depends on it.
func (l *Line) write(s string) { _, _ = io.WriteString(l.w, s) }
