package chart

import (
	"encoding/xml"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/lab/timeline"
)

func result(t *testing.T) *timeline.Result {
	t.Helper()
	f, err := timeline.ParseFault("100ms:rail1:rate=1/20")
	if err != nil {
		t.Fatal(err)
	}
	r := &timeline.Result{Bench: "rails", Block: 16 << 10, Total: 1 << 20,
		Together: 3e9, Faults: []timeline.Fault{f},
		Rails: []timeline.Rail{{Name: "rail0", Rate: 2e9, Alone: 2e9}, {Name: "<rail1>", Rate: 1e9,
			Alone: 1e9}},
		Transfers: []timeline.Transfer{{Took: timeline.Seconds(time.Second / 5), Bytes: 1 << 20}},
		Samples: timeline.Samples{Every: timeline.Seconds(timeline.SampleEvery),
			Bytes: make([][]uint64, 2)}}
	for i := range 41 {
		r.Samples.Bytes[0] = append(r.Samples.Bytes[0], uint64(i)*1250000)
		r.Samples.Bytes[1] = append(r.Samples.Bytes[1], uint64(min(i, 20))*625000)
	}
	r.Judge()
	return r
}

// The page stands alone, is well formed, and shows what happened.
func TestPage(t *testing.T) {
	var b strings.Builder
	if err := HTML(&b, "a & b", Panel{"one", result(t)}, Panel{"two", result(t)}); err != nil {
		t.Fatal(err)
	}
	page := b.String()
	for _, want := range []string{"a &amp; b", "rail0, 2gbit", "&lt;rail1&gt;", "rail1:rate=1/20",
		"all rails", "<h2>two</h2>"} {
		if !strings.Contains(page, want) {
			t.Errorf("no %q in the page", want)
		}
	}
	for _, not := range []string{"<script", "href=", "src=", "@import", "<?xml"} {
		if strings.Contains(page, not) {
			t.Errorf("%q in the page: it must need nothing else", not)
		}
	}
	for i, part := range strings.Split(page, "<svg")[1:] {
		d := xml.NewDecoder(strings.NewReader("<svg" + part[:strings.Index(part,
			"</svg>")+len("</svg>")]))
		for {
			if _, err := d.Token(); err == io.EOF {
				break
			} else if err != nil {
				t.Fatalf("plot %d: %v", i, err)
			}
		}
	}
}

// The curves are the samples: what came in each step, and the sum of the rails.
func TestSeries(t *testing.T) {
	c, err := series(result(t))
	if err != nil {
		t.Fatal(err)
	}
	if len(c) != 3 {
		t.Fatalf("%d curves for two rails and their sum", len(c))
	}
	for k, at := range c[2] {
		want := 2.0
		if at.X < 0.1 {
			want = 3
		}
		if d := at.Y - want; d > 1e-6 || d < -1e-6 {
			t.Errorf("point %d: %g Gbit/s at %g s, want %g", k, at.Y, at.X, want)
		}
	}
}

func TestNothingToDraw(t *testing.T) {
	r := result(t)
	r.Samples.Bytes = nil
	if err := Of("x")(io.Discard, r); err == nil || !strings.Contains(err.Error(), "no samples") {
		t.Errorf("%v", err)
	}
}
