package sidecar

// layoutsView is /v1/layouts: what engines registered, for `kvspray layout check`.
type layoutsView struct {
	Workers []layoutView `json:"workers"`
}

type layoutView struct {
	Name   string `json:"name"`
	Layout []byte `json:"layout"` // msgpack, docs/protocol.md section 3
}

func (n *Node) layouts() layoutsView {
	v := layoutsView{Workers: []layoutView{}}
	for _, w := range n.engine.Workers() {
		// Marshal refuses only what is longer than a registration can be.
		if b, err := w.Layout.Marshal(); err == nil {
			v.Workers = append(v.Workers, layoutView{Name: w.Name, Layout: b})
		}
	}
	return v
}
