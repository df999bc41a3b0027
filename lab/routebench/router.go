package routebench

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	startLimit = time.Minute
	endLimit   = 10 * time.Second
	clockTick  = 10 * time.Millisecond // of /proc/PID/stat
)

// names are the routers, in the order of a round. The first one is none.
var names = []string{"direct", "kvspray", "vllm-router", "sglang-router"}

// command starts a router at an address. Each has its cheapest policy for plain engines.
func (o *options) command(name, port string, urls []string) (args, env []string) {
	env = os.Environ()
	if name == "kvspray" {
		args = []string{o.binary, "proxy", "--listen", "127.0.0.1:" + port}
		for i, u := range urls {
			role := "decode"
			if o.pd && i < len(urls)/2 {
				role = "prefill"
			}
			args = append(args, "--engine", "url="+u+",role="+role)
		}
		if o.pd {
			args = append(args, "--mode", "prefill-first")
		}
		return append(args, o.extra...), env
	}
	module := strings.ReplaceAll(name, "-", "_") + ".launch_router"
	args = []string{o.python, "-m", module}
	if o.pd {
		args = append(args, "--vllm-pd-disaggregation")
		for i, u := range urls {
			args = append(args, []string{"--prefill", "--decode"}[min(2*i/len(urls), 1)], u)
		}
	} else {
		args = append(append(args, "--worker-urls"), urls...)
	}
	args = append(args, "--host", "127.0.0.1", "--port", port, "--policy", "round_robin",
		"--prometheus-port", freePort(), "--max-concurrent-requests", "8192")
	return args, append(env, "PYTHONPATH="+filepath.Join(o.packages, name))
}

func freePort() string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "0"
	}
	defer func() { _ = l.Close() }()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	return port
}

// router is a process that runs.
type router struct {
	cmd     *exec.Cmd
	address string
	done    chan error
}

func (o *options) start(ctx context.Context, name string, urls []string) (*router, error) {
	port := freePort()
	args, env := o.command(name, port, urls)
	if o.cpus != "" {
		args = append([]string{"taskset", "--cpu-list", o.cpus}, args...)
	}
	r := &router{exec.CommandContext(ctx, args[0], args[1:]...), "127.0.0.1:" + port,
		make(chan error, 1)}
	log, err := os.Create(filepath.Join(o.logs, name+".log"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = log.Close() }() // the process has its own
	r.cmd.Env, r.cmd.Stdout, r.cmd.Stderr = env, log, log
	if err := r.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	go func() { r.done <- r.cmd.Wait() }()
	one := load{clients: 1, each: 1, tokens: 1}
	for began := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		got := one.run([]string{r.address})
		if got.failed == 0 {
			return r, nil
		}
		select {
		case err := <-r.done:
			return nil, fmt.Errorf("%s ended (%v); its log is %s", name, err, log.Name())
		default:
		}
		if time.Since(began) > startLimit {
			return nil, fmt.Errorf("%s serves nothing: %w; its log is %s", name, got.err, log.Name())
		}
	}
}

func (r *router) stop() {
	_ = r.cmd.Process.Signal(os.Interrupt)
	select {
	case <-r.done:
	case <-time.After(endLimit):
		_ = r.cmd.Process.Kill()
		<-r.done
	}
}

// cpu is the time of all processors in this process, of which the kernel counts ticks.
func (r *router) cpu() (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	var sum time.Duration
	for _, f := range fields[11:13] { // utime, stime
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, err
		}
		sum += time.Duration(n) * clockTick
	}
	return sum, nil
}

// memory is the resident memory in bytes.
func (r *router) memory() int64 {
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", r.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	defer func() { _ = f.Close() }()
	text, err := io.ReadAll(f)
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	rest, _, _ = strings.Cut(rest, "kB")
	n, _ := strconv.ParseInt(strings.TrimSpace(rest), 10, 64) // absent: it has ended
	return n << 10
}

// peak samples memory while f runs.
func (r *router) peak(f func()) (top int64) {
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(200 * time.Millisecond)
		defer tick.Stop()
		for {
			top = max(top, r.memory())
			select {
			case <-stop:
				return
			case <-tick.C:
			}
		}
	})
	f()
	close(stop)
	wg.Wait()
	return top
}
