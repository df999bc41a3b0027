package railsbench

import (
	"github.com/kvspray/kvspray/bench/timeline"
	"io"
)

func HTML(w io.Writer, r *timeline.Result) error { return nil }
