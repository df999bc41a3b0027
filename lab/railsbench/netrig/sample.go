package netrig

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
)

// Counters reads what the devices of one side have received, straight from the kernel and from any
// thread.
type Counters struct {
	f     *os.File
	buf   []byte
	rails int
}

// Counters opens the counters of one side.
func (r *Rig) Counters(s Side) (*Counters, error) {
	c := &Counters{buf: make([]byte, 16<<10), rails: len(r.rates)}
	err := r.Do(s, func() (err error) {
		// A file of proc shows the namespace of the thread that opened it.
		c.f, err = os.Open("/proc/thread-self/net/dev")
		return err
	})
	return c, err
}

// Close closes the counters.
func (c *Counters) Close() { _ = c.f.Close() }

// Read fills in the bytes received so far on each rail.
func (c *Counters) Read(rx []uint64) error {
	n, err := c.f.ReadAt(c.buf, 0)
	if err != nil && err != io.EOF {
		return fmt.Errorf("netrig: counters: %w", err)
	}
	for line := range bytes.Lines(c.buf[:n]) {
		name, rest, ok := strings.Cut(strings.TrimSpace(string(line)), ":")
		num, isRail := strings.CutPrefix(name, "rail")
		if !ok || !isRail {
			continue
		}
		i, err := strconv.Atoi(num)
		field := strings.Fields(rest)
		if err != nil || i >= c.rails || len(field) == 0 {
			continue
		}
		if rx[i], err = strconv.ParseUint(field[0], 10, 64); err != nil {
			return fmt.Errorf("netrig: counters: %w", err)
		}
	}
	return nil
}

// Reading is what had come by a time.
type Reading struct {
	At time.Time
	Rx []uint64 // by rail
}

// Watch reads the counters every so often until stop is closed.
func (c *Counters) Watch(every time.Duration, stop <-chan struct{}) (out []Reading, err error) {
	t := time.NewTicker(every)
	defer t.Stop()
	for {
		r := Reading{At: time.Now(), Rx: make([]uint64, c.rails)}
		if err := c.Read(r.Rx); err != nil {
			return out, err
		}
		out = append(out, r)
		select {
		case <-stop:
			return out, nil
		case <-t.C:
		}
	}
}
