package copybench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/ui/usage"
)

// The test binary is both processes.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "copy" {
		c := NewCopyCommand()
		c.SetArgs(os.Args[2:])
		c.SilenceUsage = true
		if err := c.Execute(); err != nil {
			_, _ = fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestCopy(t *testing.T) {
	baseline := filepath.Join(t.TempDir(), baselineBinary)
	if out, err := exec.Command("cc", "-O2", "-pthread", "-o", baseline,
		"../baseline/memcpy.c").CombinedOutput(); err != nil {
		t.Fatalf("the C baseline does not build: %v\n%s", err, out)
	}
	for _, args := range [][]string{
		{"--transport", "tcp"},
		{"--transport", "tcp", "--conns", "3", "--integrity", "crc32c"},
		{"--transport", "shm", "--conns", "2", "--baseline", baseline},
	} {
		c := NewCopyCommand()
		var out, progress bytes.Buffer
		c.SetOut(&out)
		c.SetErr(&progress)
		c.SetArgs(append(args, "--blocks", "656,9KiB,28KiB,1MiB", "--total", "16MiB", "--rounds",
			"1", "--json"))
		if err := c.Execute(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, progress.String())
		}
		var r Report
		if err := json.Unmarshal(out.Bytes(), &r); err != nil {
			t.Fatal(err)
		}
		if output := progress.String(); !strings.Contains(output, "656 bytes: a warm-up and 1 rounds") ||
			!strings.Contains(output, "1048576 B: ") {
			t.Errorf("%v: progress %q", args, output)
		}
		if len(r.Results) != 4 || r.Results[0].GBps <= 0 || r.Results[0].BaselineGBps <= 0 ||
			r.Results[3].CPUPerGB <= 0 || r.Machine.Version == "" || r.Machine.Cores == 0 {
			t.Errorf("%v: %+v", args, r)
		}
	}
}

// A baseline that is none is named, with what to do.
func TestNoBaseline(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("x"), 0o755); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{text: "exec format error", "/bin/true": "/bin/true",
		text + "x": "is not at"} {
		c := NewCopyCommand()
		c.SetOut(new(bytes.Buffer))
		c.SetErr(new(bytes.Buffer))
		c.SetArgs([]string{"--transport", "shm", "--blocks", "64KiB", "--total", "1MiB", "--rounds", "1",
			"--baseline", path})
		err := c.Execute()
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(),
			"--baseline") || !strings.Contains(err.Error(), "make bin/kvspray-memcpy") {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestFlags(t *testing.T) {
	for _, args := range [][]string{
		{"--transport", "carrier-pigeon"},
		{"--blocks", "1KiB,660"},
		{"--blocks", "504"},
		{"--blocks", "32MiB", "--total", "16MiB"},
		{"--blocks", "656", "--total", "512MiB"},
		{"--blocks", "x"},
		{"--blocks", ""},
		{"--total", "1GiB"},
		{"--total", "100"},
		{"--conns", "0"},
		{"--window", "0"},
		{"--window", "5000"},
		{"--rounds", "0"},
		{"--integrity", "md5"},
		{"--transport", "shm", "--integrity", "crc32c"},
		{"--slice", "1000"},
		{"--slice", ""},
		{"--slice", "16MiB", "--total", "8MiB", "--blocks", "4KiB"},
	} {
		c := NewCopyCommand()
		c.SetOut(new(bytes.Buffer))
		c.SetErr(new(bytes.Buffer))
		c.SetArgs(args)
		if err := c.Execute(); !usage.Is(err) || !strings.Contains(err.Error(), "--") {
			t.Errorf("%v: %v", args, err)
		}
	}
}
