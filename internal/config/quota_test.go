package config

import (
	"strings"
	"testing"
)

func TestQuotas(t *testing.T) {
	id := strings.Repeat("ab", 32)
	s := Store{Memory: 1 << 30, Disk: []StoreDisk{{Size: 1 << 40}, {Size: 1 << 40}}, Quota: "0B",
		DiskQuota: "50%", ObjectQuota: "1GiB", Object: StoreObject{Size: 8 << 30},
		Namespaces: []StoreQuota{{ID: id, Quota: "25%", ObjectQuota: "0B"}}}
	if m, d, o := s.Quotas(strings.Repeat("00", 32)); m != 0 || d != 1<<40 || o != 1<<30 {
		t.Errorf("%d %d %d", m, d, o)
	}
	// What a namespace does not name is that of all.
	if m, d, o := s.Quotas(strings.ToUpper(id)); m != 1<<28 || d != 1<<40 || o != 0 {
		t.Errorf("%d %d %d", m, d, o)
	}
}
