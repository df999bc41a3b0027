package connector_test

import (
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/testutil"
)

// TestRealShim uses the C library itself, in its own process: registration, one prompt, its
// completion, BYE.
func TestRealShim(t *testing.T) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		testutil.Skip(t, "gcc", "gcc is not installed: "+err.Error())
	}
	bin := filepath.Join(t.TempDir(), "shim")
	sources, err := filepath.Glob("../pybind/src/*.c")
	must(t, err)
	args := append([]string{"-std=gnu11", "-O1", "-Wall", "-D_GNU_SOURCE", "-I", "../pybind/include",
		"-I", "../pybind/src", "-pthread", "-o", bin, "testdata/shim.c"}, sources...)
	if out, err := exec.Command(gcc, args...).CombinedOutput(); err != nil {
		t.Fatalf("compile: %v\n%s", err, out)
	}
	r := start(t, nil)
	lay, err := shape.Layout().Marshal()
	must(t, err)
	in := intent(32, 3, 4)
	in.Req = "from C"
	step := msg.Step{Step: 1, Reqs: []msg.StepReq{{Lease: 1, End: 32, Blocks: [][]uint32{{3, 4}}}}}
	cmd := exec.Command(bin, r.socket,
		fmt.Sprint(uint64(shape.Layers)*uint64(shape.NumBlocks)*shape.PageBytes()),
		fmt.Sprint(shape.Layers),
		hex.EncodeToString(lay), hex.EncodeToString(in.Append(nil)), hex.EncodeToString(step.Append(nil)))
	cmd.Stderr = os.Stderr
	var out strings.Builder
	cmd.Stdout = &out
	must(t, cmd.Start())
	kill := time.AfterFunc(20*time.Second, func() { _ = cmd.Process.Kill() })
	defer kill.Stop()
	r.rec.until(t, "all layers and hold", func() bool {
		return finals(r.rec) == shape.Layers &&
			len(r.rec.holds) == 1
	})
	got := r.rec.seen().intents[0]
	if got.Req != "from C" || got.Key.Xfer != in.Xfer || got.Key.Hash != in.Hash ||
		asJSON(r.rec.seen().progress[0].Blocks) != "[[3,4]]" {
		t.Errorf("intent %+v, progress %+v", got, r.rec.seen().progress[0])
	}
	up := r.lastUp(t)
	if up.Name != "c/shim/tp0" {
		t.Errorf("name %q", up.Name)
	}
	must(t, r.Complete(up, engines.Completion{Lease: got.Lease, Status: board.OK, Grants: 1,
		Bytes: 4096}))
	must(t, cmd.Wait())
	if want := fmt.Sprintf("%d %d 1\n", board.RecSent, board.OK); out.String() != want {
		t.Errorf("the shim saw %q, want %q", out.String(), want)
	}
	r.rec.until(t, "exit", func() bool { return len(r.rec.gone) == 1 })
	if r.bad.get("packet")+r.bad.get("register")+r.bad.get("step")+r.bad.get("intent") > 0 {
		t.Errorf("malformed: %v", r.bad.n)
	}
}
