package explain

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
)

// Engine is one engine's registered layouts, one per worker.
type Engine struct {
	Name    string
	Layouts []*layout.Layout
}

// Verdict is the result of comparing the caches of two engines.
type Verdict struct {
	From        string   `json:"from"`
	To          string   `json:"to"`
	Means       []string `json:"differs"`  // in meaning: nothing may move
	Geometry    []string `json:"geometry"` // in shape: a plan must bridge it
	Refused     string   `json:"refused,omitempty"`
	Contributor int      `json:"contributors"` // largest number of sources of a receiver

	// Of the first worker of each engine; all workers of an engine have the same. Sidecars compare
	// them before they plan.
	Fingerprints [2]string `json:"fingerprints"`
}

// OK reports that KV can move.
func (v *Verdict) OK() bool { return len(v.Means) == 0 && v.Refused == "" }

// Check compares the registrations of two engines, and plans from all workers of one to each worker
// of the other.
func Check(from, to *Engine) (*Verdict, error) {
	reg := parseblock.Default()
	v := &Verdict{From: from.Name, To: to.Name}
	for i, e := range []*Engine{from, to} {
		if len(e.Layouts) == 0 {
			return nil, fmt.Errorf("%s: no engine has registered a cache there", e.Name)
		}
		sum, err := reg.Fingerprint(e.Layouts[0])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", e.Name, err)
		}
		v.Fingerprints[i] = fmt.Sprintf("%x", sum)
	}
	for _, a := range from.Layouts {
		for _, b := range to.Layouts {
			da, err := reg.Describe(a)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", from.Name, err)
			}
			db, err := reg.Describe(b)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", to.Name, err)
			}
			for _, d := range da.Diff(db) {
				if !slices.Contains(v.Means, d) {
					v.Means = append(v.Means, d)
				}
			}
			for _, d := range layout.DiffGeometry(a, b) {
				if !slices.Contains(v.Geometry, d) && len(v.Geometry) < 32 {
					v.Geometry = append(v.Geometry, d)
				}
			}
		}
	}
	for _, b := range to.Layouts {
		shares, err := parseblock.Assign(reg, from.Layouts, b, nil)
		if err != nil {
			v.Refused = err.Error()
			break
		}
		v.Contributor = max(v.Contributor, len(shares))
	}
	return v, nil
}

// MaxEngineBytes bounds a sidecar's answer about its engines.
const MaxEngineBytes = 64 << 20

// maxWorkers bounds the workers of an engine. Each is compared with each, so their number counts
// squared.
const maxWorkers = 1024

// ParseEngine reads the engine with this id (or the only one, if empty) from a sidecar's answer to
// GET /v1/layouts.
func ParseEngine(name, engine string, r io.Reader) (*Engine, error) {
	reg := parseblock.Default()
	var engines []string
	var reply nodeapi.Layouts
	if err := json.NewDecoder(r).Decode(&reply); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	e := &Engine{Name: name}
	for _, w := range reply.Workers {
		if engine != "" && w.Engine != engine {
			continue
		}
		if !slices.Contains(engines, w.Engine) {
			engines = append(engines, w.Engine)
		}
		l, err := layout.Unmarshal(w.Layout)
		if err == nil {
			err = layout.ValidateForeign(l, reg.Planes)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: worker %q: %w", name, w.Name, err)
		}
		if len(e.Layouts) == maxWorkers {
			return nil, fmt.Errorf("%s: more than %d workers of one engine; "+
				"name one of several engines as %s#ENGINE", name, maxWorkers, name)
		}
		e.Layouts = append(e.Layouts, l)
	}
	switch {
	case len(engines) > 1:
		return nil, fmt.Errorf("%s: %d engines are registered there: name one of %q as %s#ENGINE", name,
			len(engines), engines, name)
	case len(e.Layouts) == 0 && engine != "":
		return nil, fmt.Errorf("%s: engine %q is not registered there", name, engine)
	case len(e.Layouts) == 0:
		return nil, fmt.Errorf("%s: no engine has registered a cache there", name)
	}
	return e, nil
}

// WriteText writes the verdict for people.
func (v *Verdict) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s to %s\n", v.From, v.To)
	for _, d := range v.Means {
		fmt.Fprintf(&b, "  differs: %s\n", d)
	}
	if v.Refused != "" {
		fmt.Fprintf(&b, "  refused: %s\n", v.Refused)
	}
	for _, d := range v.Geometry {
		fmt.Fprintf(&b, "  shape: %s\n", d)
	}
	switch {
	case !v.OK():
		b.WriteString("no: decode would have to prefill by itself\n")
	case len(v.Geometry) == 0:
		b.WriteString("ok: pages move as they are\n")
	default:
		fmt.Fprintf(&b, "the bytes mean the same, and a plan exists (%d workers give to one); it needs "+
			"a reshape\n", v.Contributor)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
