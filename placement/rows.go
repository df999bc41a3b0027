package placement

// Rows is a cost model of attention over the cache of another node: query rows go to the cache and
// partial results come back, instead of the cache to the queries. A row is one head of one token.
// Sizes are bytes, times are seconds.
//
// A route moves bytes in each layer of each decode step, one layer after the other. A fetch happens
// once. Engines do not route rows today; the model shows where it would help. It is that of arXiv
// 2606.01502.
type Rows struct {
	Query   float64 // bytes of a query row
	Partial float64 // bytes of a row's partial result
	Token   float64 // bytes of KV cache per token and layer
	Layers  int
	Holder  float64 // time of the holder's kernel, per layer
	Merge   float64 // time to merge partial results, per layer
	Splice  float64 // time to rotate and insert fetched tokens, all layers
	Local   float64 // time to prefill one token in one layer
}

// MLA27 has the parameters of arXiv 2606.01502 for DeepSeek-V2-Lite: latent attention with bf16
// rows of 576 and 512 columns, 27 layers, the splice of 2,048 tokens. Holder is the middle of its
// 15 to 37 us, Merge its upper bound, Local the middle of its 0.5 to 1.5 us.
func MLA27() Rows {
	const bf16, fp32 = 2, 4
	return Rows{Query: 576 * bf16, Partial: 512*bf16 + 2*fp32, Token: 576 * bf16, Layers: 27,
		Holder: 26e-6, Merge: 25e-6, Splice: 2.91e-3, Local: 1e-6}
}

// Wire is the time on the fabric of rows to one holder and of their results back, in one layer.
func (r Rows) Wire(f Fabric, rows int) float64 {
	return f.Time(float64(rows) * (r.Query + r.Partial))
}

// Route is the time of one layer: Wire, the holder's kernel and the merge.
func (r Rows) Route(f Fabric, rows int) float64 { return r.Wire(f, rows) + r.Holder + r.Merge }

// Step is the time of one decode step, in which layers follow each other.
func (r Rows) Step(f Fabric, rows int) float64 { return float64(r.Layers) * r.Route(f, rows) }

// Fetch is the time to move and insert the cache of some tokens, all layers, once.
func (r Rows) Fetch(f Fabric, tokens int) float64 {
	return float64(tokens)*r.Token*float64(r.Layers)/f.Rate + r.Splice
}

// Compute is the time of a local prefill.
func (r Rows) Compute(tokens int) float64 { return float64(tokens) * float64(r.Layers) * r.Local }

// LayerBytes is the cache of some tokens in one layer.
func (r Rows) LayerBytes(tokens int) float64 { return float64(tokens) * r.Token }

// EvenRows is the number of rows whose bytes equal those of the cache of some tokens: more rows are
// more bytes than the cache.
func (r Rows) EvenRows(tokens int) float64 { return r.LayerBytes(tokens) / (r.Query + r.Partial) }

// SpliceRate is the rate, in bytes per second, below which moving rows takes longer than the splice
// of a fetch alone.
func (r Rows) SpliceRate(rows int) float64 {
	return float64(rows) * (r.Query + r.Partial) / r.Splice
}

// FetchFrom is the number of tokens from which a fetch is faster than a local prefill; 0: never.
func (r Rows) FetchFrom(f Fabric) float64 {
	each := float64(r.Layers) * (r.Local - r.Token/f.Rate)
	if each <= 0 {
		return 0
	}
	return r.Splice / each
}

// RepaidAfter is the number of decode steps from which one fetch is faster than routing each step.
func (r Rows) RepaidAfter(f Fabric, rows, tokens int) float64 {
	return r.Fetch(f, tokens) / r.Step(f, rows)
}
