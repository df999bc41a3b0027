// SPDX-License-Identifier: Apache-2.0

package railsbench

import (
	"os/exec"
	"testing"

	"github.com/kvspray/kvspray/internal/mistake"
)

// A sidecar that refuses its configuration was told something wrong; one that panics, which has the same exit code, was not.
func TestAtStart(t *testing.T) {
	const hint = "kvspray: transfer.nope: unknown key\nSee 'kvspray serve --help'."
	for _, x := range []struct {
		exit, log string
		want      bool
	}{{"exit 2", hint, true}, {"exit 1", hint, false}, {"exit 2", "panic: nil map\n\ngoroutine 1 [running]:", false}, {"kill -9 $$", hint, false}} {
		err := exec.CommandContext(t.Context(), "sh", "-c", x.exit).Run()
		if got := mistake.Is(atStart(err, x.log)); err == nil || got != x.want {
			t.Errorf("%s after %q: a mistake: %v", x.exit, x.log, got)
		}
	}
}
