package config

import (
	"slices"
	"strings"
	"testing"
)

func TestEnvironment(t *testing.T) {
	sets, err := FromEnvironment([]string{"HOME=/root", "KVSPRAY_PORT=tcp://10.0.0.1:80",
		"KVSPRAY_SET_STORE_DISK=/a=1TiB", "KVSPRAY_SET_PEER_CLUSTER_KEY_FILE=/k", "KVSPRAY_SET_NODE="})
	want := []string{"node=", "peer.cluster_key_file=/k", "store.disk=/a=1TiB"}
	if err != nil || !slices.Equal(sets, want) {
		t.Errorf("%v, %v, want %v", sets, err, want)
	}
	for name, text := range map[string]string{
		"KVSPRAY_SET_PEER_LISEN": `did you mean KVSPRAY_SET_PEER_LISTEN?`,
		"KVSPRAY_SET_":           "an environment variable of no key",
		"KVSPRAY_SET_PEER":       "of no key", // a section
		"KVSPRAY_SET_node":       "of no key",
	} {
		if _, err := FromEnvironment([]string{name + "=x"}); err == nil || !strings.Contains(err.Error(),
			text) {
			t.Errorf("%s: %v, want %q", name, err, text)
		}
	}
}

// Every key has a variable of its own, and Set takes each.
func TestEveryKeyHasAVariable(t *testing.T) {
	owner := map[string]string{}
	for _, f := range Fields() {
		name := EnvName(f.Key)
		if !settable(f) {
			continue
		}
		if other, ok := owner[name]; ok {
			t.Errorf("%s and %s have one variable, %s", other, f.Key, name)
		}
		owner[name] = f.Key
		sets, err := FromEnvironment([]string{name + "=\x00"})
		if err != nil || len(sets) != 1 || sets[0] != f.Key+"=\x00" {
			t.Errorf("%s: %v, %v", name, sets, err)
			continue
		}
		err = Default().Set(sets[0])
		if err != nil && (strings.Contains(err.Error(), "names a section") ||
			strings.Contains(err.Error(), "no such key")) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
