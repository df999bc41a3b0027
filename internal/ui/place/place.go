// Package place writes the tables of `kvspray place`: choices with their parts, calibrated lines,
// and the model of query rows. No goroutines.
package place

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/kvspray/kvspray/placement"
)

// row is a choice for people and programs.
type row struct {
	Kind     string  `json:"kind"`
	Engine   string  `json:"engine"`
	Source   string  `json:"source,omitempty"`
	Store    string  `json:"store,omitempty"`
	Loaded   int     `json:"loaded_tokens,omitempty"` // of the reused ones, from the store
	Reused   int     `json:"reused_tokens"`
	Moved    int     `json:"moved_tokens"`
	Computed int     `json:"computed_tokens"`
	Wait     float64 `json:"wait_seconds"`
	Prefill  float64 `json:"prefill_seconds"`
	Transfer float64 `json:"transfer_seconds"`
	Hidden   float64 `json:"hidden_seconds"`
	Decode   float64 `json:"decode_seconds"`
	TTFT     float64 `json:"ttft_seconds"`
	Price    float64 `json:"price"`
}

// Explain ranks the choices of a case and writes at most limit of them; 0: all.
func Explain(w io.Writer, c *placement.Case, limit int, asJSON bool) error {
	list := placement.Rank(&c.State, &c.Ask, nil)
	if limit > 0 {
		list = list[:min(limit, len(list))]
	}
	rows := make([]row, len(list))
	for i, x := range list {
		rows[i] = row{x.Kind.String(), c.Names[x.Engine], "", "", x.Loaded, x.Reused, x.Moved,
			x.Computed, x.Wait,
			x.Prefill, x.Transfer, x.Hidden, x.Decode, x.TTFT(), x.Price}
		if x.Source >= 0 {
			rows[i].Source = c.Names[x.Source]
		}
		if x.Store >= 0 {
			rows[i].Store = c.Names[x.Store]
		}
	}
	if asJSON {
		return json.NewEncoder(w).Encode(map[string]any{"tokens": c.Ask.Tokens, "choices": rows})
	}
	if len(rows) == 0 {
		_, err := fmt.Fprintln(w, "no engine takes the request: no engine decodes, and prefills or "+
			"has a path from one that does")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	line(t, "choice", "engine", "source", "store", "loaded", "reused", "moved", "computed",
		"wait ms", "prefill ms",
		"transfer ms", "hidden ms", "decode ms", "TTFT ms", "price")
	ms := func(s float64) string { return fmt.Sprintf("%.1f", 1000*s) }
	for _, r := range rows {
		line(t, r.Kind, r.Engine, r.Source, r.Store, r.Loaded, r.Reused, r.Moved,
			r.Computed, ms(r.Wait), ms(r.Prefill),
			ms(r.Transfer), ms(r.Hidden), ms(r.Decode), ms(r.TTFT), fmt.Sprintf("%.4f", r.Price))
	}
	return t.Flush()
}

// line writes cells; the writer keeps an error for Flush.
func line(t *tabwriter.Writer, cells ...any) {
	for _, c := range cells {
		_, _ = fmt.Fprintf(t, "%v\t", c)
	}
	_, _ = fmt.Fprintln(t)
}

// Calibration writes a calibration file.
func Calibration(w io.Writer, c *placement.Calibration) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(c)
}

// Rows writes what query rows cost on each fabric beside a fetch and a local prefill.
func Rows(w io.Writer, r placement.Rows, fabrics []placement.Fabric, rows, tokens int) error {
	_, err := fmt.Fprintf(w, "%d rows to the cache of %d tokens. More than %.0f rows are more bytes "+
		"than that cache in one layer (%.2f MB).\nA local prefill takes %.2f ms. Below %.2f GB/s the "+
		"rows take longer than the splice of a fetch.\n\n", rows, tokens, r.EvenRows(tokens),
		r.LayerBytes(tokens)/1e6, 1e3*r.Compute(tokens), r.SpliceRate(rows)/1e9)
	if err != nil {
		return err
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	line(t, "fabric", "wire us", "layer us", "step ms", "fetch ms", "repaid after steps",
		"fetch wins from tokens")
	for _, f := range fabrics {
		from := "never"
		if n := r.FetchFrom(f); n > 0 {
			from = fmt.Sprintf("%.0f", n)
		}
		line(t, f.Name, fmt.Sprintf("%.1f", 1e6*r.Wire(f, rows)), fmt.Sprintf("%.1f",
			1e6*r.Route(f, rows)), fmt.Sprintf("%.2f", 1e3*r.Step(f, rows)), fmt.Sprintf("%.2f",
			1e3*r.Fetch(f, tokens)), fmt.Sprintf("%.1f", r.RepaidAfter(f, rows, tokens)), from)
	}
	return t.Flush()
}
