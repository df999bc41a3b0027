package exec

import (
	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/engines"
)

// workers are the engine workers of this sidecar.
type workers struct {
	*core
	all     map[*engines.Worker]*worker
	vacated Instant // when the last worker left; the start if none was here
}

// worker is one engine worker with its leases.
type worker struct {
	w       *engines.Worker
	tiers   []*peerv1.RailTier // of our rails for its memory
	tiersOf int                // the list of rails that they are of
	sources map[uint64]*source
	dests   map[uint64]*dest
	sends   int // open SendParts from its memory
	gone    bool
}

// up adds an engine worker.
func (wk *workers) up(w *engines.Worker) {
	wk.all[w] = &worker{w: w, sources: map[uint64]*source{}, dests: map[uint64]*dest{}}
}

// idle reports a departed worker whose last lease has ended.
func (wk *workers) idle(ws *worker) {
	if ws.gone && len(ws.dests) == 0 && len(ws.sources) == 0 && wk.all[ws.w] == ws {
		delete(wk.all, ws.w)
		wk.emit(WorkerFenced).Worker = ws.w
	}
}

// vacant reports that no engine is connected. An engine that lost its session begins another
// within vacantWait and presents its intents again.
func (wk *workers) vacant() bool {
	for _, w := range wk.all {
		if !w.gone {
			return false
		}
	}
	return true
}
