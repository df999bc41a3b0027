package exec

import (
	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/connector"
)

// workers are the engine workers of this sidecar.
type workers struct {
	*core
	all     map[*connector.Worker]*worker
	vacated Instant // when the last worker left; the start if none was here
}

type worker struct {
	w       *connector.Worker
	tiers   []*peerv1.RailTier // of our rails for its memory
	tiersOf int                // the list of rails that they are of
	sources map[uint64]*source
	dests   map[uint64]*dest
	sends   int // open SendParts from its memory
	gone    bool
}

// WorkerUp introduces an engine worker.
func (wk *workers) up(w *connector.Worker) {
	wk.all[w] = &worker{w: w, sources: map[uint64]*source{}, dests: map[uint64]*dest{}}
}

// workerIdle reports a gone worker whose last lease ended.
func (wk *workers) idle(ws *worker) {
	if ws.gone && len(ws.dests) == 0 && len(ws.sources) == 0 && wk.all[ws.w] == ws {
		delete(wk.all, ws.w)
		wk.emit(WorkerFenced).Worker = ws.w
	}
}

// vacant reports that no engine is connected. One that has just lost its session begins another, and its intents come with it; those who ask
// later than vacantWait need not wait.
func (wk *workers) vacant() bool {
	for _, w := range wk.all {
		if !w.gone {
			return false
		}
	}
	return true
}
