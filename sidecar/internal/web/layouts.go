package web

import (
	"cmp"
	"slices"

	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/nodeapi"
)

func (w *Server) layouts() nodeapi.Layouts {
	v := nodeapi.Layouts{Workers: []nodeapi.Layout{}}
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
			v.Workers = append(v.Workers, nodeapi.Layout{Name: x.Name, Engine: x.Place.Engine,
				Rank: x.Place.Rank(), Layout: b})
		}
	}
	return v
}
