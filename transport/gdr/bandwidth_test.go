package gdr

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transport"
	"github.com/kvspray/kvspray/transport/transporttest"
)

// TestDeviceBandwidth compares lanes with ib_write_bw on the same rails of the guest, with as many
// queue pairs, in turns. KVSPRAY_BENCH_RDMA is the number of pairs. An emulated processor shows
// nothing about speed; the ratio is what gdr adds to the verbs that both use. ib_write_bw drives
// all its queue pairs from one thread, a lane of gdr has its own. With KVSPRAY_RDMA_GOAL, for
// instance 0.90, a median below it fails.
func TestDeviceBandwidth(t *testing.T) {
	pairs, err := strconv.Atoi(os.Getenv("KVSPRAY_BENCH_RDMA"))
	if err != nil {
		testutil.Skip(t, "rdma-bench", "KVSPRAY_BENCH_RDMA is not the number of pairs: make bench-rdma")
	}
	goal, err := goalIn(os.Getenv("KVSPRAY_RDMA_GOAL"))
	if err != nil {
		t.Fatal(err)
	}
	ends(t) // or skip
	fmt.Println("| what | rails | queue pairs of each | ib_write_bw MiB/s | gdr MiB/s | median " +
		"ratio | least | most | ib_write_bw run again | gdr run again " +
		"|\n|---|---|---|---|---|---|---|---|---|---|")
	for _, c := range []struct {
		name    string
		message int // of ib_write_bw
		shape   transporttest.Shape
		rails   int
	}{
		{"1 MiB pieces", 1 << 20, transporttest.Shape{Chunks: 256, BlockBytes: 64 << 10, Gapless: true},
			1},
		{"64 KiB pieces", 64 << 10, transporttest.Shape{Chunks: 256, BlockBytes: 64 << 10}, 1},
		{"scattered 16 KiB blocks", 16 << 10, transporttest.Shape{Chunks: 256, BlockBytes: 16 << 10,
			Shuffle: true}, 1},
		{"1 MiB pieces", 1 << 20, transporttest.Shape{Chunks: 256, BlockBytes: 64 << 10, Gapless: true},
			4},
		{"64 KiB pieces", 64 << 10, transporttest.Shape{Chunks: 256, BlockBytes: 64 << 10}, 4},
		{"scattered 16 KiB blocks", 16 << 10, transporttest.Shape{Chunks: 256, BlockBytes: 16 << 10,
			Shuffle: true}, 4},
	} {
		for _, lanes := range []int{1, 2} { // 2 is the default of transports.gdr.queue_pairs
			t.Run(fmt.Sprintf("%s/%d rails/%d queue pairs", c.name, c.rails, lanes), func(t *testing.T) {
				const bytesEach = 64 << 20 // of a rail
				var movers []*transporttest.Mover
				// In as many slices as there are in the window at least: the first of them register
				// memory.
				each := func(total int) error {
					errs := make([]error, len(movers))
					var all sync.WaitGroup
					for i, m := range movers {
						all.Go(func() { errs[i] = m.Try(total/lanes/sliceBytes, sliceBytes/(64<<10), 8) })
					}
					all.Wait()
					return errors.Join(errs...)
				}
				move := func() (float64, error) {
					if movers == nil {
						for rail := range c.rails {
							for range lanes {
								movers = append(movers, transporttest.NewMover(t, railEnds(rail), c.shape))
							}
						}
						if err := each(bytesEach / 4); err != nil {
							t.Fatal(err)
						}
					}
					began := time.Now()
					if err := each(bytesEach); err != nil {
						// what is left of them is fewer queue pairs than there should be
						movers = nil
						for rail := range c.rails {
							t.Logf("%v; %s counted %s", err, railName(rail), counted(railName(rail)))
						}
						return 0, err
					}
					return float64(c.rails*bytesEach) / (1 << 20) / time.Since(began).Seconds(), nil
				}
				var ratios, theirs, ours []float64
				var again, lost int
				for range pairs {
					ib, repeats, err := untilFigure(func() (float64, error) {
						return writeBW(c.rails, lanes, c.message, bytesEach)
					})
					if err != nil {
						t.Fatal(err)
					}
					gdr, broken, err := untilFigure(move)
					if err != nil {
						t.Fatal(err)
					}
					again, lost = again+repeats, lost+broken
					ratios, theirs, ours = append(ratios, gdr/ib), append(theirs, ib), append(ours, gdr)
				}
				slices.Sort(ratios)
				slices.Sort(theirs)
				slices.Sort(ours)
				fmt.Printf(
					"| %s | %d | %d | %.0f | %.0f | %.2f | %.2f | %.2f | %d times in %d | %d times in %d |\n",
					c.name, c.rails, lanes, median(theirs), median(ours), median(ratios),
					ratios[0], ratios[len(ratios)-1], again, pairs+again, lost, pairs+lost)
				if err := missed(ratios, goal); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// goalIn reads KVSPRAY_RDMA_GOAL; 0: there is none.
func goalIn(s string) (float64, error) {
	if s == "" {
		return 0, nil
	}
	goal, err := strconv.ParseFloat(s, 64)
	if err != nil || !(goal > 0 && goal <= 10) {
		return 0, fmt.Errorf("KVSPRAY_RDMA_GOAL=%q: write the minimum ratio, for instance 0.90", s)
	}
	return goal, nil
}

// missed is an error where the median of sorted ratios is below the goal.
func missed(ratios []float64, goal float64) error {
	if m := median(ratios); m < goal {
		return fmt.Errorf("the median ratio is %.3f: the goal is %.2f", m, goal)
	}
	return nil
}

func TestGoal(t *testing.T) {
	for s, want := range map[string]float64{"": 0, "0.90": 0.9, "1.2": 1.2} {
		if got, err := goalIn(s); err != nil || got != want {
			t.Errorf("%q: %g, %v", s, got, err)
		}
	}
	for _, s := range []string{"0", "-1", "90", "NaN", "fast"} {
		if got, err := goalIn(s); err == nil {
			t.Errorf("%q was taken as %g", s, got)
		}
	}
	for _, c := range []struct {
		ratios []float64
		goal   float64
		ok     bool
	}{{[]float64{0.1, 0.9, 2}, 0.9, true}, {[]float64{0.1, 0.899, 2}, 0.9, false}, {[]float64{0.8, 1},
		0.9, true}, {[]float64{0.01}, 0, true}} {
		if err := missed(c.ratios, c.goal); (err == nil) != c.ok {
			t.Errorf("%v under a goal of %g: %v", c.ratios, c.goal, err)
		}
	}
}

// A run without a figure is made again, up to a bound; a run that never has one is an error with
// its output.
func TestUntilFigure(t *testing.T) {
	starved := errors.New("starved")
	for _, c := range []struct{ without, repeats int }{{0, 0}, {1, 1}, {writeBWTries - 1,
		writeBWTries - 1}, {writeBWTries, writeBWTries}} {
		runs := 0
		v, repeats, err := untilFigure(func() (float64, error) {
			if runs++; runs <= c.without {
				return 0, starved
			}
			return 42, nil
		})
		if c.without < writeBWTries && (v != 42 || err != nil) || c.without == writeBWTries &&
			!errors.Is(err, starved) || repeats != c.repeats || runs > writeBWTries {
			t.Errorf("%d runs without a figure: %g after %d repeats in %d runs, %v", c.without, v,
				repeats, runs, err)
		}
	}
	const line = " 65536      1024             0.00               0.00                 0.000000\n"
	if v := average([]byte(line)); v != 0 {
		t.Errorf("a starved run's line: %g", v)
	}
	if v := average([]byte(" #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   " +
		"MsgRate[Mpps]\n" + strings.ReplaceAll(line, "0.00 ", "31.5 "))); v != 31.5 {
		t.Errorf("a line of numbers: %g", v)
	}
}

// median of sorted values.
func median(v []float64) float64 { return (v[(len(v)-1)/2] + v[len(v)/2]) / 2 }

// railName is the device at the sending end.
func railName(rail int) string { return fmt.Sprintf("r%da", rail) }

// counted are the error counters of a soft-RoCE device, which show why a lane was
// lost. Its tries are counted by refusals of packets that came out of order, too, and begin anew
// with an acknowledgement only: of a message of 1 MiB there are few. ib_write_bw sets 7 tries,
// which are for ever there.
func counted(device string) string {
	dir := filepath.Join("/sys/class/infiniband", device, "ports/1/hw_counters")
	all, err := os.ReadDir(dir)
	if err != nil {
		return err.Error()
	}
	var out []string
	for _, f := range all {
		if v, err := os.ReadFile(filepath.Join(dir, f.Name())); err == nil && len(v) < 32 &&
			strings.TrimSpace(string(v)) != "0" {
			out = append(out, f.Name()+" "+strings.TrimSpace(string(v)))
		}
	}
	return strings.Join(out, ", ")
}

// railEnds is ends on another rail.
func railEnds(rail int) transporttest.Factory {
	made := 0
	return func(testing.TB) transport.Backend {
		i := made % 2
		made++
		return New(guestConfig(fmt.Sprintf("r%d%c", rail, "ab"[i]), fmt.Sprintf("10.9.%d.%d:0",
			rail, i+1)))
	}
}

// writeBWTries is how often ib_write_bw is run for one figure: where it starves it ends with an
// error, or with a rate of 0.00.
const writeBWTries = 5

// untilFigure runs once more what ended without a figure, writeBWTries times at most, and counts
// that.
func untilFigure(run func() (float64, error)) (v float64, repeats int, err error) {
	for ; repeats < writeBWTries; repeats++ {
		if v, err = run(); err == nil && v > 0 {
			return v, repeats, nil
		}
	}
	return 0, repeats, fmt.Errorf("no figure in %d runs: %w", writeBWTries, err)
}

// writeBW runs ib_write_bw with some queue pairs on each rail at once and adds up their figures, in
// MiB/s. All of them are to have a figure: rails that are measured one after the other are not four
// at once.
func writeBW(rails, lanes, message, total int) (sum float64, err error) {
	rates, errs := make([]float64, rails), make([]error, rails)
	var all sync.WaitGroup
	for i := range rails {
		all.Go(func() { rates[i], errs[i] = writeBWOn(i, lanes, message, total) })
	}
	all.Wait()
	for _, v := range rates {
		sum += v
	}
	return sum, errors.Join(errs...)
}

// writeBWOn runs ib_write_bw on one rail: total bytes over all its queue pairs. An error where it
// prints nothing, or 0.
func writeBWOn(rail, lanes, message, total int) (float64, error) {
	const connecting = 20 * time.Second // until its server listens
	args := []string{"-F", "-x", "1", "-u", strconv.Itoa(guestTimer), "-s", strconv.Itoa(message),
		"-n", strconv.Itoa(total / lanes / message), "-q", strconv.Itoa(lanes), "-t", "128", "-p",
		strconv.Itoa(18515 + rail)}
	server := exec.Command("ib_write_bw", append([]string{"-d", fmt.Sprintf("r%db", rail)},
		args...)...)
	if err := server.Start(); err != nil {
		return 0, err
	}
	// the client prints what counts; a server without a client, or whose client has failed, waits
	// for ever
	defer func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	}()
	var out []byte
	var err error
	for deadline := time.Now().Add(connecting); time.Now().Before(deadline); {
		out, err = exec.Command("ib_write_bw", append(append([]string{"-d", fmt.Sprintf("r%da", rail)},
			args...), fmt.Sprintf("10.9.%d.2", rail))...).CombinedOutput()
		if err == nil || !bytes.Contains(out, []byte("Couldn't connect")) {
			break
		}
	}
	v := average(out)
	if err == nil && v == 0 {
		err = errors.New("a rate of 0.00")
	}
	if err != nil {
		return 0, fmt.Errorf("ib_write_bw on rail %d: %w: %s", rail, err, out)
	}
	return v, nil
}

// average finds the fourth column of the last line of numbers.
func average(out []byte) (v float64) {
	for s := bufio.NewScanner(bytes.NewReader(out)); s.Scan(); {
		f := strings.Fields(s.Text())
		if len(f) == 5 {
			if x, err := strconv.ParseFloat(f[3], 64); err == nil {
				v = x
			}
		}
	}
	return v
}
