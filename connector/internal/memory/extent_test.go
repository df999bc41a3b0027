package memory

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestParseMaps reads views of files from a list of mappings; private memory and anonymous pages
// are not shared.
func TestParseMaps(t *testing.T) {
	const maps = `1000-3000 rw-s 00005000 00:01 77                         /memfd:kv (deleted)
3000-4000 rw-p 00000000 00:01 77                         /memfd:kv (deleted)
4000-6000 rw-s 00000000 103:2a 88                        /dev/shm/with a name
6000-7000 rw-p 00000000 00:00 0
8000-9000 rw-s 00000000 00:01 99                         /memfd:beyond (deleted)
`
	for name, c := range map[string]struct {
		addr, bytes uint64
		want        []Extent
	}{
		"all of one": {0x1000, 0x2000, []Extent{{File: [2]uint64{1, 77}, from: 0x5000, to: 0x7000,
			Field: "f"}}},
		"a part of one": {0x1800, 0x100, []Extent{{File: [2]uint64{1, 77}, from: 0x5800, to: 0x5900,
			Field: "f"}}},
		"private":   {0x3000, 0x1000, nil},
		"anonymous": {0x6000, 0x1000, nil},
		"two, and private": {0x2800, 0x2000, []Extent{{File: [2]uint64{1, 77}, from: 0x6800, to: 0x7000,
			Field: "f"}, {File: [2]uint64{0x1032a, 88}, to: 0x800, Field: "f"}}},
		"none": {0x7000, 0x1000, nil},
	} {
		got, err := parseMaps(strings.NewReader(maps), c.addr, c.bytes, "f")
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(Extent{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	var many strings.Builder
	for range maxViewExtents + 1 {
		many.WriteString("1000-3000 rw-s 00005000 00:01 77 x\n")
	}
	if _, err := parseMaps(strings.NewReader(many.String()), 0x1000, 0x2000, "f"); err == nil {
		t.Error("any number of mappings is kept")
	}
	if _, err := parseMaps(strings.NewReader("zz-3000 rw-s 0 00:01 77 x\n"), 0, 1, "f"); err == nil {
		t.Error("a line that is none was read")
	}
}
