package verbs

import "testing"

func TestLockedIn(t *testing.T) {
	for caps, free := range map[string]bool{"0000000000004000": true, "000001ffffffbfff": false,
		"0000000000000000": false} {
		status := "Name:\tkvspray\nVmLck:\t      12 kB\nVmPin:\t    2048 " +
			"kB\nCapPrm:\t000001ffffffffff\nCapEff:\t" + caps + "\n"
		if got := lockedIn(status); got.Locked != 2<<20 || got.Free != free {
			t.Errorf("%s: %+v, want 2 MiB, free: %v", caps, got, free)
		}
	}
	if got := lockedIn("nothing\nVmPin:\nCapEff: what\n"); got != (LockedMemory{}) {
		t.Errorf("a file without values: %+v", got)
	}
}
