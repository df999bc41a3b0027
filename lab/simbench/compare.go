package simbench

import (
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/kvspray/kvspray/lab/timeline"
)

// Tolerance is the largest accepted error of a prediction: of throughput, and of the cost of a
// fault.
const Tolerance = 0.07

// Predict is the run of a result, on simulated rails of the rates that plain streams had.
func Predict(real *timeline.Result, seed uint64) Setup {
	o := &timeline.Options{Block: real.Block, Total: granules(real.Total), Duration: real.Duration.D(),
		Faults: real.Faults}
	var sum timeline.Rate
	for _, r := range real.Rails {
		o.Rates = append(o.Rates, r.Rate)
		sum += r.Alone
	}
	s := Setup{Options: o, Nodes: 2, Seed: seed, Rails: append([]timeline.Rail(nil), real.Rails...)}
	// Where plain streams get less at once than one by one, processors are in the way; each rail then
	// has its part of what is left.
	if real.Together > 0 && real.Together < sum {
		for i := range s.Rails {
			s.Rails[i].Alone *= real.Together / sum
		}
	}
	return s
}

// Compare writes what both runs measured beside each other; the error names everything that is
// further apart than Tolerance.
func Compare(real, simulated *timeline.Result, w io.Writer) error {
	var far []string
	var err error
	row := func(what string, a, b float64) {
		d := b - a
		mark := ""
		if math.Abs(d) > Tolerance || math.IsNaN(d) {
			mark = "  too far"
			far = append(far, fmt.Sprintf("%s: %.3f measured, %.3f simulated", what, a, b))
		}
		if err == nil {
			_, err = fmt.Fprintf(w, "%-48s measured %.3f  simulated %.3f  %+.3f%s\n", what, a, b, d, mark)
		}
	}
	share := func(r *timeline.Result) float64 {
		if r.Together == 0 {
			return math.NaN()
		}
		return float64(r.Goodput / r.Together)
	}
	row("goodput, of plain streams together", share(real), share(simulated))
	if len(real.Faults) == 0 {
		row("first transfer, of plain streams together", real.Cold, simulated.Cold)
		row("later transfers, of plain streams together", real.Warm, simulated.Warm)
	}
	if len(real.Dips) != len(simulated.Dips) {
		return fmt.Errorf(
			"%d faults had a time in the measured run, %d in the simulated one: it ended earlier",
			len(real.Dips), len(simulated.Dips))
	}
	for i, d := range real.Dips {
		row(fmt.Sprintf("%s after %v, of what is expected", timeline.Depth, d.Faults), d.Share,
			simulated.Dips[i].Share)
	}
	if err == nil && len(far) > 0 {
		err = fmt.Errorf("more than %.2f apart: %s", Tolerance, strings.Join(far, "; "))
	}
	return err
}
