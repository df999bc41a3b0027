package web

import (
	"cmp"
	"slices"

	"github.com/kvspray/kvspray/control/engines"
)

// layoutsView is /v1/layouts: the registered layouts, for `kvspray layout`. Ranks of an engine are
// in order.
type layoutsView struct {
	Workers []layoutView `json:"workers"`
}

type layoutView struct {
	Name   string `json:"name"`
	Engine string `json:"engine"` // its kind and id
	Rank   string `json:"rank"`   // within the engine
	Layout []byte `json:"layout"` // msgpack, docs/protocol.md section 3
}

func (w *Server) layouts() layoutsView {
	v := layoutsView{Workers: []layoutView{}}
	workers := w.o.Workers()
	slices.SortFunc(workers, func(a, b *engines.Worker) int {
		return cmp.Or(cmp.Compare(a.Place.Engine, b.Place.Engine), cmp.Compare(a.Place.PP, b.Place.PP),
			cmp.Compare(a.Place.TP, b.Place.TP))
	})
	for _, x := range workers {
		if x.Layout == nil {
			continue // it uses the store only
		}
		// Marshal refuses only layouts longer than a registration can be.
		if b, err := x.Layout.Marshal(); err == nil {
			v.Workers = append(v.Workers, layoutView{Name: x.Name, Engine: x.Place.Engine,
				Rank: x.Place.Rank(), Layout: b})
		}
	}
	return v
}
