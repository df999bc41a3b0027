// SPDX-License-Identifier: Apache-2.0

package testutil

import "testing"

func TestMustRun(t *testing.T) {
	for _, c := range []struct {
		list, feature string
		want          bool
	}{
		{"", "rdma", false},
		{"rdma", "rdma", true},
		{"vllm,rdma", "rdma", true},
		{"all", "rdma", true},
		{"rdma2", "rdma", false},
	} {
		if got := mustRun(c.list, c.feature); got != c.want {
			t.Errorf("mustRun(%q, %q) = %v", c.list, c.feature, got)
		}
	}
}

func TestSkipSkips(t *testing.T) {
	t.Setenv(MustRunEnv, "")
	ran := false
	t.Run("inner", func(t *testing.T) {
		Skip(t, "nothing", "shown by the test that asks")
		ran = true
	})
	if ran {
		t.Error("Skip returned")
	}
}

var kept []byte

func TestAllocates(t *testing.T) {
	if n := Allocates(func() { kept = make([]byte, 1<<20); kept = make([]byte, 1<<20) }); n < 2<<20 || n > 2<<20+allocNoise {
		t.Errorf("twice a mebibyte, one of it garbage, is %d bytes", n)
	}
	AllocatesAtMost(t, 1<<20, "a mebibyte", func() { kept = make([]byte, 1<<20) })
}
