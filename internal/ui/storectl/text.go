package storectl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/store/disk"
)

// shown is a text of others without control characters, which would change the terminal.
func shown(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}

func table(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 0, 2, ' ', 0) }

// row writes a line; Flush returns the errors of all.
func row(t *tabwriter.Writer, format string, args ...any) {
	_, _ = fmt.Fprintf(t, format+"\n", args...)
}

func mib(n uint64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

func (c *Client) stat(s *nodeapi.Store) error {
	var b strings.Builder
	t := table(&b)
	row(t, "TIER\tPAGES\tBYTES\tCAPACITY\tHITS\tEVICTED\tEVICTION AGE\tMEAN GET\tPROBLEM")
	for _, x := range s.Tiers {
		mean := "-"
		if x.Gets > 0 {
			mean = microseconds(x.GetSeconds / float64(x.Gets)).String()
		}
		age := "-"
		if x.Evicted > 0 {
			age = microseconds(x.EvictionAge).String()
		}
		row(t, "%s\t%d\t%s\t%s\t%d\t%d\t%s\t%s\t%s", shown(x.Name), x.Pages, mib(x.Bytes),
			mib(x.Capacity), x.Hits, x.Evicted, age, mean, shown(x.Problem))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(&b, "pages: %d missed, %d stored, %d existed, %d refused, %d damaged; pinned %s; "+
		"%d namespaces are open\n", s.Misses, s.Stored, s.Existed, s.Refused, s.Damaged, mib(s.Pinned),
		len(s.Namespaces))
	for _, x := range s.Tiers {
		if x.Removed > 0 {
			fmt.Fprintf(&b, "removed pages: %s of %s are still to be overwritten or deleted\n",
				mib(x.Removed), shown(x.Name))
		}
	}
	if s.Drained {
		b.WriteString("drained: it takes no pages\n")
	}
	_, err := io.WriteString(c.Out, b.String())
	return err
}

func (c *Client) namespaces(s *nodeapi.Store) error {
	t := table(c.Out)
	row(t, "NAMESPACE\tWEIGHTS\tDTYPE\tPAGE TOKENS\tPAGE BYTES\tPOOLS\tPRIVATE")
	for _, x := range s.Namespaces {
		row(t, "%s\t%s\t%s\t%d\t%d\t%d\t%v", shown(x.ID), shown(x.Weights), shown(x.DType),
			x.PageTokens, x.PageBytes, x.Pools, x.Private)
	}
	return t.Flush()
}

// ErrDamaged is the result of Check for a store with damage, which was printed.
var ErrDamaged = errors.New("store: damage was found; a sidecar drops what is damaged when it " +
	"meets it, and serves the rest. If it comes again, replace the device")

// Check reads all of a disk store that no sidecar has open, and prints its damage.
func Check(ctx context.Context, paths []string, asJSON bool, out io.Writer) error {
	r, err := disk.Inspect(ctx, paths)
	if err != nil {
		return err
	}
	if asJSON {
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		err = e.Encode(r)
	} else {
		err = printReport(out, r)
	}
	if r.Damaged > 0 {
		return errors.Join(err, ErrDamaged)
	}
	return err
}

func printReport(out io.Writer, r *disk.Report) error {
	var b strings.Builder
	for _, f := range r.Findings {
		what := "segment"
		if f.Key != "" {
			what = "page " + f.Key + " of namespace " + f.Namespace
		}
		fmt.Fprintf(&b, "%s segment %d offset %d: %s: %s\n", f.Path, f.Segment, f.Offset, what, f.Problem)
	}
	if n := r.Damaged + r.Torn - uint64(len(r.Findings)); n > 0 {
		fmt.Fprintf(&b, "and %d more\n", n)
	}
	fmt.Fprintf(&b, "store %s: %d of %d segments used, %d unfinished; %d pages are whole (%s), "+
		"%d are forgotten, %d torn, %d damaged\n", r.Store, r.Used, r.Segments, r.Unfinished, r.Pages,
		mib(r.Bytes), r.Forgotten, r.Torn, r.Damaged)
	_, err := io.WriteString(out, b.String())
	return err
}

// microseconds is a time in whole microseconds.
func microseconds(s float64) time.Duration {
	return time.Duration(math.Round(s*1e6)) * time.Microsecond
}
