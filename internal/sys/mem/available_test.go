// SPDX-License-Identifier: Apache-2.0

package mem

import "testing"

func TestAvailable(t *testing.T) {
	n, err := availableOf("MemTotal:       2000 kB\nMemAvailable:    1234 kB\nBuffers: 1 kB\n")
	if n != 1234<<10 || err != nil {
		t.Error(n, err)
	}
	for _, bad := range []string{"", "MemTotal: 1 kB\n", "MemAvailable: x kB\n",
		"MemAvailable: -1 kB\n", "MemAvailable: 99999999999999999999 kB\n"} {
		if _, err := availableOf(bad); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
	if n, err := Available(); err != nil || n == 0 {
		t.Error(n, err)
	}
}
