package disk

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

const childEnv = "KVSPRAY_DISK_CHILD"

func killConfig(path string) Config {
	return Config{Devices: []Device{{path, segmentsAt + 12<<20}}, SegmentBytes: 1 << 20,
		MaxPages: 4096}
}

// TestKillChild is the process that is killed: it writes prompts for ever, removes them all
// now and then, and prints which pages are durable, and which are removed.
func TestKillChild(t *testing.T) {
	path := os.Getenv(childEnv)
	if path == "" {
		return
	}
	tier, err := Open(killConfig(path))
	if err != nil {
		fmt.Println("error", err)
		return
	}
	own(t, tier)
	for i := 0; ; i += 10 {
		got, err := load(tier, 0, i, i+10)
		if err != nil && len(got) == 0 && i > 100_000 {
			return
		}
		for _, p := range got {
			fmt.Println("durable", p)
		}
		fmt.Println("evicted", tier.Stats().Evicted)
		if i%3000 == 490 {
			fmt.Println("removing", i+10)
			if tier.Remove(simSpace(0)) == nil {
				fmt.Println("removed", i+10)
			}
		}
	}
}

// kill -9 at any moment of a process that writes, evicts and cleans on a real file: what it
// acknowledged last is there, and what it removed is not. KVSPRAY_STORE=long: 500 times.
func TestKill(t *testing.T) {
	dir, rounds := t.TempDir(), 10
	if os.Getenv("KVSPRAY_STORE") == "long" {
		rounds = 500
	}
	for round := range rounds {
		at := 500 + rand.IntN(3000) // lines
		cmd := exec.Command(os.Args[0], "-test.run=^TestKillChild$", "-test.v")
		cmd.Env = append(os.Environ(), childEnv+"="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var durable []int
		acknowledged, gone := 0, 0
		s := bufio.NewScanner(out)
		for lines := 0; s.Scan(); {
			word, rest, _ := strings.Cut(s.Text(), " ")
			switch word {
			case "error":
				t.Error(rest)
			case "durable":
				n, _ := strconv.Atoi(rest)
				durable = append(durable, n)
				acknowledged++
			case "removing": // it may be done already
				durable = nil
			case "removed":
				gone, _ = strconv.Atoi(rest)
			}
			if lines++; lines == at {
				_ = cmd.Process.Kill() // what it had printed is read to the end
			}
		}
		_ = cmd.Wait() // it was killed
		tier, err := Open(killConfig(dir))
		if err != nil {
			t.Fatal(err)
		}
		own(t, tier)
		if acknowledged == 0 {
			t.Fatal("nothing was acknowledged")
		}
		// The last 100 pages are not yet given up: the store holds 2,000.
		for _, p := range durable[max(0, len(durable)-100):] {
			if !has(t, tier, 0, p) {
				t.Errorf("round %d: page %d was durable, and is gone", round, p)
			}
		}
		for p := range gone {
			if has(t, tier, 0, p) {
				t.Errorf("round %d: page %d was removed, and is back", round, p)
			}
		}
		t.Logf("round %d, killed at line %d: %d pages acknowledged, %d in the store", round, at,
			acknowledged, tier.Stats().Pages)
		_ = tier.Close()
	}
}
