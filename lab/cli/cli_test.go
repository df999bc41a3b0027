package cli

import (
	"bytes"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/ui/command"
)

// A wrong argument or flag has the exit code of usage errors, and its error has the correct form.
func TestUsageErrors(t *testing.T) {
	for args, want := range map[string][]string{
		"gpu hops": {`"hops"`, "staged, within, nvlink, multipath"},
		"cpoy":     {`unknown command "cpoy" for "kvspray-bench"`, "Did you mean copy?"},
		"help bogus": {`unknown command "bogus"`,
			"There are completion, copy, gpu, peers, place, rails, rdma, route, sim, version"},
		"copy --rounds many":    {`--rounds "many"`, "a whole number"},
		"sim --seed -1":         {`--seed "-1"`, "not negative"},
		"rails 2gbit":           {"rails takes no arguments", "type: kvspray-bench rails"},
		"peers --engines x":     {`"x" is none of kvspray`},
		"rails --sidecar /none": {"--sidecar", "/none", "name the kvspray program"},
		"peers --sidecar /none": {"--sidecar", "/none", "name the kvspray program"},
	} {
		var out, errs bytes.Buffer
		code := Main(strings.Fields(args), &out, &errs)
		if code != command.ExitUsage || out.Len() > 0 {
			t.Errorf("%s: exit code %d, and it printed %q", args, code, &out)
		}
		for _, w := range append(want, "kvspray-bench: ", "--help'") {
			if !strings.Contains(errs.String(), w) {
				t.Errorf("%s: %q is not in %s", args, w, &errs)
			}
		}
	}
}

func TestVersion(t *testing.T) {
	var one, other, errs bytes.Buffer
	if Main([]string{"version"}, &one, &errs) != 0 || Main([]string{"--version"}, &other,
		&errs) != 0 ||
		one.String() != other.String() || !strings.HasPrefix(one.String(), "kvspray-bench ") {
		t.Errorf("%q and %q: %s", &one, &other, &errs)
	}
}
