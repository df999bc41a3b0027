// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"errors"
	"strings"
	"testing"
)

// A store that the host has no memory for is refused before anything is taken.
func TestStoreFitsTheHost(t *testing.T) {
	has := func(n uint64, err error) func() (uint64, error) {
		return func() (uint64, error) { return n, err }
	}
	if err := fits(1<<30, has(1<<30, nil)); err != nil {
		t.Error(err)
	}
	if err := fits(1<<30, has(0, errors.New("unknown"))); err != nil {
		t.Error(err)
	}
	err := fits(4<<40, has(20<<30, nil))
	for _, want := range []string{"store.memory", "4TiB", "20480 MiB", "lower it"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v lacks %q", err, want)
		}
	}
}
