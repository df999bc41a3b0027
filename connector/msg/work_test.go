package msg

import (
	"bytes"
	"strings"
	"testing"
)

// Work memory and its doorbell come together.
func TestRegisterWorkNeedsBoth(t *testing.T) {
	full, err := EncodePacket(&Register{ID: 2, Session: [16]byte{1}, Layout: goldenLayout(t),
		FDs:     FDs{0, 1, 2, 3, 4, 5},
		Regions: []Region{{Region: [16]byte{1}, Kind: KindMemfd, Bytes: 4096, FD: 6}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ old, new, want string }{{"work", "work", ""}, {"\xa4work", "\xa4walk",
		"work"}, {"work_bell", "walk_bell", "work_bell"}} {
		m, err := DecodePacket(bytes.Replace(full, []byte(c.old), []byte(c.new), 1))
		if c.want == "" {
			if err != nil || m.(*Register).FDs != (FDs{0, 1, 2, 3, 4, 5}) {
				t.Errorf("%v, %v", m, err)
			}
		} else if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(),
			"missing") {
			t.Errorf("without %s: %v", c.want, err)
		}
	}
}
