package gdr

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
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

// TestDeviceBandwidth compares a lane with ib_write_bw on the same rail of the guest, in turns. KVSPRAY_BENCH_RDMA is the number
// of pairs. An emulated processor says nothing about speed; the ratio says what gdr adds to the verbs that both use.
func TestDeviceBandwidth(t *testing.T) {
	pairs, err := strconv.Atoi(os.Getenv("KVSPRAY_BENCH_RDMA"))
	if err != nil {
		testutil.Skip(t, "rdma-bench", "KVSPRAY_BENCH_RDMA is not the number of pairs: make bench-rdma")
	}
	ends(t) // or skip
	fmt.Println("| what | rails | ib_write_bw MiB/s | gdr MiB/s | median ratio | least | most |\n|---|---|---|---|---|---|---|")
	for _, c := range []struct {
		name    string
		message int // of ib_write_bw
		shape   transporttest.Shape
		rails   int
	}{
		{"1 MiB pieces", 1 << 20, transporttest.Shape{Chunks: 256, BlockBytes: 64 << 10, Gapless: true}, 1},
		{"64 KiB pieces", 64 << 10, transporttest.Shape{Chunks: 256, BlockBytes: 64 << 10}, 1},
		{"scattered 16 KiB blocks", 16 << 10, transporttest.Shape{Chunks: 256, BlockBytes: 16 << 10, Shuffle: true}, 1},
		{"64 KiB pieces", 64 << 10, transporttest.Shape{Chunks: 256, BlockBytes: 64 << 10}, 4},
	} {
		var movers []*transporttest.Mover
		for i := range c.rails {
			movers = append(movers, transporttest.NewMover(t, railEnds(i), c.shape))
		}
		const bytesEach = 64 << 20
		var ratios, theirs, ours []float64
		for pair := range pairs + 1 {
			ib := writeBW(t, c.rails, c.message, bytesEach)
			began := time.Now()
			var all sync.WaitGroup
			for _, m := range movers {
				all.Go(func() { m.Move(bytesEach/sliceBytes, sliceBytes/(64<<10), 8) })
			}
			all.Wait()
			gdr := float64(c.rails*bytesEach) / (1 << 20) / time.Since(began).Seconds()
			if pair > 0 { // the first one registers memory
				ratios, theirs, ours = append(ratios, gdr/ib), append(theirs, ib), append(ours, gdr)
			}
		}
		slices.Sort(ratios)
		slices.Sort(theirs)
		slices.Sort(ours)
		fmt.Printf("| %s | %d | %.0f | %.0f | %.2f | %.2f | %.2f |\n", c.name, c.rails, median(theirs), median(ours), median(ratios), ratios[0], ratios[len(ratios)-1])
	}
}

// median of sorted values.
func median(v []float64) float64 { return (v[(len(v)-1)/2] + v[len(v)/2]) / 2 }

// railEnds is ends on another rail.
func railEnds(rail int) transporttest.Factory {
	made := 0
	return func(testing.TB) transport.Backend {
		i := made % 2
		made++
		return New(guestConfig(fmt.Sprintf("r%d%c", rail, "ab"[i]), fmt.Sprintf("10.9.%d.%d:0", rail, i+1)))
	}
}

// writeBW runs ib_write_bw on each rail at once and adds up what they say, in MiB/s.
func writeBW(t *testing.T, rails, message, total int) (sum float64) {
	t.Helper()
	var mu sync.Mutex
	var all sync.WaitGroup
	for i := range rails {
		args := []string{"-F", "-x", "1", "-u", strconv.Itoa(guestTimer), "-s", strconv.Itoa(message), "-n", strconv.Itoa(total / message), "-t", "128", "-p", strconv.Itoa(18515 + i)}
		server := exec.Command("ib_write_bw", append([]string{"-d", fmt.Sprintf("r%db", i)}, args...)...)
		if err := server.Start(); err != nil {
			t.Fatal(err)
		}
		all.Go(func() {
			defer func() { _ = server.Wait() }() // the client says what counts
			var out []byte
			var err error
			for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); {
				if out, err = exec.Command("ib_write_bw", append(append([]string{"-d", fmt.Sprintf("r%da", i)}, args...), fmt.Sprintf("10.9.%d.2", i))...).CombinedOutput(); err == nil {
					break // until the server listens
				}
			}
			v := average(out)
			if err != nil || v == 0 {
				t.Errorf("ib_write_bw on rail %d: %v: %s", i, err, out)
			}
			mu.Lock()
			sum += v
			mu.Unlock()
		})
	}
	all.Wait()
	return sum
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
