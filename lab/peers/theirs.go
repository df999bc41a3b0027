package peers

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvspray/kvspray/lab/railsbench"
	"github.com/kvspray/kvspray/lab/railsbench/netrig"
	"github.com/kvspray/kvspray/lab/timeline"
)

// Bounds of a driver.
const (
	driverPatience = 60 * time.Second // for a step of its set-up
	regionBytes    = 768 << 20
	maxLine        = 8 << 20
	logTail        = 4 << 10 // of a driver's log: its end has why it could not start
)

// driver is one end of another engine.
type driver struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan line
	log   string
}

// line is what a driver sends.
type line struct {
	Ready    json.RawMessage `json:"ready"`
	Met      bool            `json:"met"`
	Prepared bool            `json:"prepared"`
	Digest   string          `json:"digest"`
	Done     *int            `json:"done"`
	Began    float64         `json:"began"`
	Took     float64         `json:"took"`
	Bytes    uint64          `json:"bytes"`
	Error    string          `json:"error"`
}

func (o *options) start(f *railsbench.Field, e engine, side netrig.Side, block int,
	total int64) (*driver, error) {
	role := [...]string{"initiator", "target"}[side]
	d := &driver{lines: make(chan line, 16), log: filepath.Join(o.out, e.name+"-"+role+".log")}
	log, err := os.Create(d.log)
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }()
	// UCX finds its devices in /sys, which shows those of the namespace in which it was mounted.
	d.cmd = exec.Command("unshare", "--mount", "sh", "-c", `mount -t sysfs sysfs /sys && exec "$@"`,
		"sh", o.python, o.driver, e.driver, role, "--ip", netrig.Addr(side, 0).String(), "--block",
		fmt.Sprint(block), "--total", fmt.Sprint(total),
		"--region", fmt.Sprint(regionBytes))
	d.cmd.Env = append(os.Environ(), e.env...)
	d.cmd.Stderr = log
	if d.in, err = d.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := d.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := f.Rig.Start(side, d.cmd); err != nil {
		return nil, fmt.Errorf("%s: %w; `make bench-peers` makes the environment", o.python, err)
	}
	go func() {
		defer close(d.lines)
		s := bufio.NewScanner(out)
		s.Buffer(nil, maxLine)
		for s.Scan() {
			var l line
			if json.Unmarshal(s.Bytes(), &l) == nil {
				d.lines <- l
			}
		}
	}()
	return d, nil
}

func (d *driver) stop() {
	_ = d.in.Close()
	limit := time.AfterFunc(2*time.Second, func() { _ = d.cmd.Process.Kill() })
	for range d.lines {
	}
	_ = d.cmd.Wait() // killed, perhaps: nothing depends on how it ends
	limit.Stop()
}

func (d *driver) send(what string, v any) error {
	b, err := json.Marshal(map[string]any{what: v})
	if err != nil {
		return err
	}
	_, err = d.in.Write(append(b, '\n'))
	return err
}

var errEnded = errors.New("the driver ended")

// unableError is why an engine cannot be started here: its last output, if it had some.
type unableError struct{ why string }

func (e *unableError) Error() string { return e.why }

// unable makes one of what went wrong while a driver was set up.
func (d *driver) unable(err error) error {
	why := err.Error()
	if b, rerr := os.ReadFile(d.log); rerr == nil {
		lines := strings.Split(strings.TrimSpace(string(b[max(len(b)-logTail, 0):])), "\n")
		if last := strings.TrimSpace(lines[len(lines)-1]); last != "" {
			why = last
		}
	}
	return &unableError{why}
}

// next is what the driver sends next.
func (d *driver) next(ctx context.Context, patience time.Duration) (line, error) {
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case l, ok := <-d.lines:
		if !ok {
			return l, fmt.Errorf("%w; see %s", errEnded, d.log)
		}
		return l, nil
	case <-t.C:
		return line{}, fmt.Errorf("no word from the driver within %v; see %s", patience, d.log)
	case <-ctx.Done():
		return line{}, ctx.Err()
	}
}

func (d *driver) ask(ctx context.Context, what string, v any) (line, error) {
	if err := d.send(what, v); err != nil {
		return line{}, fmt.Errorf("%w; see %s", err, d.log)
	}
	return d.next(ctx, driverPatience)
}

// theirs moves with another engine. What becomes of it is part of the result (failure); err is what
// keeps the comparison from going on.
func (o *options) theirs(ctx context.Context, f *railsbench.Field, e engine, opt *timeline.Options,
	res *timeline.Result) (failure string, err error) {
	target, err := o.start(f, e, netrig.Receiver, opt.Block, opt.Total)
	if err != nil {
		return "", err
	}
	defer target.stop()
	l, err := target.next(ctx, driverPatience)
	if err != nil {
		return "", target.unable(err)
	}
	initiator, err := o.start(f, e, netrig.Sender, opt.Block, opt.Total)
	if err != nil {
		return "", err
	}
	defer initiator.stop()
	hello, err := initiator.ask(ctx, "target", l.Ready)
	if err != nil {
		return "", initiator.unable(err)
	}
	if _, err := target.ask(ctx, "initiator", hello.Ready); err != nil {
		return "", target.unable(err)
	}
	if _, err := initiator.ask(ctx, "prepare", true); err != nil {
		return "", initiator.unable(err)
	}
	want := map[string]any{"seconds": opt.Duration.Seconds(), "count": 0}
	// A transfer that a fault stops for good has to end some time, too.
	patience := opt.Duration + driverPatience
	if opt.Duration == 0 {
		want["count"] = healthyCount
	}
	last := -1
	watched := f.Watch(ctx, opt.Faults, func(base time.Time) error {
		if err := initiator.send("go", want); err != nil {
			return err
		}
		for {
			l, err := initiator.next(ctx, patience)
			switch {
			case errors.Is(err, errEnded):
				failure = err.Error()
				return nil
			case err != nil:
				return err
			case l.Done != nil:
				return nil
			}
			began := time.UnixMicro(int64(l.Began * 1e6)).Sub(base)
			res.Transfers = append(res.Transfers, timeline.Transfer{Began: timeline.Seconds(began),
				Took: timeline.Seconds(l.Took * 1e9), Bytes: l.Bytes, Error: l.Error})
			if l.Error == "" {
				last++
			}
		}
	}, res)
	if watched != nil {
		return failure, watched
	}
	// One that failed has written over what an earlier one brought: then there is nothing to compare.
	if failure != "" || last < 0 || last != len(res.Transfers)-1 {
		return failure, nil
	}
	a, err := initiator.ask(ctx, "digest", last)
	if err != nil {
		return err.Error(), nil // it does not answer any more: part of the result
	}
	b, err := target.ask(ctx, "digest", last)
	if err != nil {
		return err.Error(), nil
	}
	if a.Digest != b.Digest || a.Digest == "" {
		return "content differs", nil
	}
	return "", nil
}
