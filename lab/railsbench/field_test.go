package railsbench

import (
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/lab/timeline"
)

// A baseline that other load disturbed makes a run void, over one rail or over all of them, and a
// quiet machine's does not.
func TestVoid(t *testing.T) {
	rail := func(alone timeline.Rate) []timeline.Rail {
		return []timeline.Rail{{Name: "rail0", Rate: 2e9, Alone: alone}, {Name: "rail1", Rate: 1e9,
			Alone: 0.95e9}}
	}
	for _, x := range []struct {
		alone, together timeline.Rate
		want            string
	}{
		{1.9e9, 2.85e9, ""},
		{1.5e9, 2.85e9, "the run is void: a plain stream over rail0 of 2gbit carries 1.5gbit, less " +
			"than 0.8 of it"},
		{1.9e9, 0.25e9, "the run is void: plain streams over all rails, 3gbit together, carry 250mbit, " +
			"less than 0.8 of it"},
		{0, 0, "the run is void"},
	} {
		err := void(rail(x.alone), x.together)
		if (err == nil) != (x.want == "") || err != nil && !(errors.Is(err, ErrVoid) &&
			strings.HasPrefix(err.Error(), x.want)) {
			t.Errorf("%s alone, %s together: %v, want %q", x.alone, x.together, err, x.want)
		}
	}
}

// A sidecar that refuses its configuration had a wrong one; one that panics, which has the
// same exit code, was not.
func TestAtStart(t *testing.T) {
	const hint = "kvspray: transfer.nope: unknown key\nSee 'kvspray serve --help'."
	for _, x := range []struct {
		exit, log string
		want      bool
	}{{"exit 2", hint, true}, {"exit 1", hint, false}, {"exit 2", "panic: nil map\n\ngoroutine 1 " +
		"[running]:", false}, {"kill -9 $$", hint, false}} {
		err := exec.CommandContext(t.Context(), "sh", "-c", x.exit).Run()
		if got := usage.Is(atStart(err, x.log)); err == nil || got != x.want {
			t.Errorf("%s after %q: a usage error: %v", x.exit, x.log, got)
		}
	}
}
