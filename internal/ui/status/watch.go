package status

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Bounds of the interval.
const (
	MinInterval = 100 * time.Millisecond // limits the load on the sidecar
	MaxInterval = time.Minute
)

// eraseScreen moves the cursor to the first line and erases all.
const eraseScreen = "\x1b[H\x1b[2J"

// Watch writes the status at each interval until ctx ends. On a terminal each status replaces the
// one before it; elsewhere an empty line separates them. A read that fails later than the first
// shows the last status and the error.
func Watch(ctx context.Context, addr string, interval time.Duration, w io.Writer) error {
	var prev, cur *Status
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		s, err := Read(ctx, addr)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && cur == nil:
			return err
		case err == nil:
			prev, cur = cur, s
		}
		text := cur.Text(prev)
		if err != nil {
			text += fmt.Sprintf("! state of %s; %s\n", cur.At.Format(time.TimeOnly), clean(err.Error()))
		}
		if columns, rows, ok := screen(w); ok {
			text = eraseScreen + fit(text, columns, rows)
		} else {
			text += "\n"
		}
		if _, err := io.WriteString(w, text); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// screen returns the size of a terminal; false: w is none, or one without escape codes.
func screen(w io.Writer) (columns, rows int, ok bool) {
	f, isFile := w.(*os.File)
	if !isFile || os.Getenv("TERM") == "dumb" {
		return 0, 0, false
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil || size.Col == 0 || size.Row == 0 {
		return 0, 0, false
	}
	return int(size.Col), int(size.Row), true
}

const moreTroubles = "  and " // how many are not listed

// isTrouble reports whether a line is of what needs attention, or counts the rest of it.
func isTrouble(line string) bool {
	return strings.HasPrefix(line, "! ") || strings.HasPrefix(line, moreTroubles)
}

// fit cuts a text to a screen: lines to its columns, and lines at the end. The last row stays free
// for the cursor. What needs attention is the end of the text, and a screen that cuts the text
// shows it instead of the tables' last lines.
func fit(text string, columns, rows int) string {
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	if room := max(rows-1, 1); len(lines) > room {
		first := len(lines)
		for first > 0 && len(lines)-first < room/2 && isTrouble(lines[first-1]) {
			first--
		}
		lines = append(lines[:room-(len(lines)-first):room-(len(lines)-first)], lines[first:]...)
	}
	for i, l := range lines {
		if r := []rune(l); len(r) > columns {
			lines[i] = string(r[:columns])
		}
	}
	return strings.Join(lines, "\n") + "\n"
}
