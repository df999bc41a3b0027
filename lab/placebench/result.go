package placebench

import (
	"slices"
)

// result is what one policy did.
type result struct {
	requests, decisions, inTime, again, answers int

	ttft                    []float64
	regret, moved, computed float64
	tpot                    float64 // sum of all answers' mean times per token
}

// Row is a result for people and programs.
type Row struct {
	Policy   string  `json:"policy"`
	P50      float64 `json:"ttft_p50_seconds"`
	P99      float64 `json:"ttft_p99_seconds"`
	Mean     float64 `json:"ttft_mean_seconds"`
	TPOT     float64 `json:"tpot_mean_seconds"`
	PerSec   float64 `json:"requests_per_second"`
	Computed float64 `json:"computed_share"` // of the prompts' tokens
	Moved    float64 `json:"moved_bytes"`
	Regret   float64 `json:"regret_mean_seconds"`
	Again    int     `json:"dispatched_again"`
}

func (r *result) row(name string, o options, tokens float64) Row {
	slices.Sort(r.ttft)
	at := func(q float64) float64 { return r.ttft[int(q*float64(len(r.ttft)-1))] }
	sum := 0.0
	for _, t := range r.ttft {
		sum += t
	}
	return Row{Policy: name, P50: at(0.5), P99: at(0.99), Mean: sum / float64(len(r.ttft)),
		TPOT: r.tpot / float64(max(1, r.answers)), PerSec: float64(r.inTime) / o.Seconds,
		Computed: r.computed / tokens, Moved: r.moved,
		Regret: r.regret / float64(max(1, r.decisions)), Again: r.again}
}
