package sidecar

import (
	"maps"
	"sync"

	"github.com/kvspray/kvspray/transfer"
)

// maxLaneErrors bounds the remembered reasons; the log has further ones.
const maxLaneErrors = 4096

// pairName is a local rail and a peer's rail.
type pairName struct {
	peer                     transfer.Boot
	transport, local, remote string
}

// laneErrors holds the reasons for missing lanes, from the last try to open each.
type laneErrors struct {
	mu sync.Mutex
	m  map[pairName]string // guarded by mu
}

// set remembers a reason; nil forgets it.
func (t *laneErrors) set(p pairName, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil {
		delete(t.m, p)
		return
	}
	if t.m == nil {
		t.m = map[pairName]string{}
	}
	if _, known := t.m[p]; known || len(t.m) < maxLaneErrors {
		t.m[p] = err.Error()
	}
}

// forget drops the reasons of a peer.
func (t *laneErrors) forget(peer transfer.Boot) {
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.DeleteFunc(t.m, func(p pairName, _ string) bool { return p.peer == peer })
}

func (t *laneErrors) of(p pairName) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.m[p]
}
