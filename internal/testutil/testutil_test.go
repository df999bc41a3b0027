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
