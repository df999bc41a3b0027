package rdmacheck

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

const (
	baselineTool  = "ib_write_bw" // of perftest
	baselinePort  = 18515
	baselineBytes = 256 << 10 // of a message, as of the transport's writes
	baselineTime  = 20 * time.Second
)

// errNoBaseline: the tool is not installed.
var errNoBaseline = errors.New(baselineTool + " is not installed (package perftest)")

// baseline is a server of ib_write_bw.
type baseline struct {
	stop context.CancelFunc
	done chan struct{}
}

func (b *baseline) end() {
	if b != nil {
		b.stop()
		<-b.done
	}
}

// baseline runs ib_write_bw on the open rail: its server until end, or its client. Nothing of the
// command line comes from the peer but numbers and an address.
func (l *local) baseline(ctx context.Context, q *request, a *answer) error {
	if l.dev == nil || q.Lanes < 1 || q.Lanes > maxQueues || q.Count < 1 {
		return errRequest
	}
	path, err := exec.LookPath(baselineTool)
	if err != nil {
		return errNoBaseline
	}
	rail, port, _ := strings.Cut(l.rail, "/")
	if port == "" {
		port = "1"
	}
	args := []string{"-F", "-d", rail, "-i", port, "-x", strconv.Itoa(l.dev.GID().Index), "-s",
		strconv.Itoa(baselineBytes), "-n", strconv.Itoa(q.Count), "-q", strconv.Itoa(q.Lanes), "-u",
		strconv.Itoa(l.env.Timer), "-p", strconv.Itoa(baselinePort)}
	if q.Host == "" {
		l.base.end()
		run, stop := context.WithTimeout(l.life, baselineTime)
		server := exec.CommandContext(run, path, args...)
		if err := server.Start(); err != nil {
			stop()
			return err
		}
		l.base = &baseline{stop, make(chan struct{})}
		go func() {
			defer close(l.base.done)
			_ = server.Wait() // the client has the figures
		}()
		return nil
	}
	host, _, err := net.SplitHostPort(q.Host)
	if err != nil {
		return errRequest
	}
	ctx, cancel := context.WithTimeout(ctx, baselineTime)
	defer cancel()
	for {
		out, err := exec.CommandContext(ctx, path, append(args, host)...).CombinedOutput()
		switch {
		case err == nil:
			if a.MiBps = average(string(out)); a.MiBps == 0 {
				return fmt.Errorf("%s printed no rate: %s", baselineTool, lastLine(string(out)))
			}
			return nil
		case ctx.Err() != nil:
			return fmt.Errorf("%s: no result within %s", baselineTool, baselineTime)
		case !strings.Contains(string(out), "Couldn't connect"): // its server is not up yet
			return fmt.Errorf("%s: %w: %s", baselineTool, err, lastLine(string(out)))
		}
	}
}

// average is the fourth column of the last line of numbers.
func average(out string) (v float64) {
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) != 5 {
			continue
		}
		if x, err := strconv.ParseFloat(f[3], 64); err == nil {
			v = x
		}
	}
	return v
}

func lastLine(out string) string {
	out = strings.TrimSpace(out)
	return out[strings.LastIndexByte(out, '\n')+1:]
}
