package placement

import (
	"encoding/json"
	"errors"
	"fmt"
)

// File is a state file: what `kvspray place explain` reads. docs/placement.md describes it.
type File struct {
	TokenBytes float64      `json:"token_bytes"`
	Overlap    float64      `json:"overlap"`
	Engines    []FileEngine `json:"engines"`
	Stores     []FileStore  `json:"stores"`
	Paths      []FilePath   `json:"paths"`
}

// FileEngine is one engine of a state file.
type FileEngine struct {
	Name string `json:"name"`
	Role string `json:"role"` // both (default), prefill or decode
	// Endpoint of its sidecar, as in the links of other engines.
	Endpoint string `json:"endpoint"`
	// Prefill names a line of the calibration file instead of the two fields below it.
	Prefill      string   `json:"prefill"`
	PrefillFixed float64  `json:"prefill_fixed_seconds"`
	PrefillRate  float64  `json:"prefill_tokens_per_second"`
	Wait         float64  `json:"wait_seconds"`
	Ready        *float64 `json:"ready_seconds"` // default: wait_seconds
	Step         float64  `json:"step_seconds"`
	StepEach     float64  `json:"step_seconds_each"`
	Running      int      `json:"running"`
	Arrivals     float64  `json:"arrivals_per_second"`
	Hit          int      `json:"hit_tokens"`
	// Links is the sidecar's answer to GET /v1/links, unchanged.
	Links json.RawMessage `json:"links"`
}

// FileStore is one tier of a store.
type FileStore struct {
	Name  string          `json:"name"`
	Ready float64         `json:"ready_seconds"`
	Hit   int             `json:"hit_tokens"`
	Links json.RawMessage `json:"links"`
}

// FilePath is one path that does not come from links.
type FilePath struct {
	From   string  `json:"from"`
	To     string  `json:"to"`
	Fabric string  `json:"fabric"` // a line of the calibration file instead of the two fields below
	Fixed  float64 `json:"fixed_seconds"`
	Rate   float64 `json:"bytes_per_second"`
	Before float64 `json:"before_bytes"`
}

// Bounds of a state file.
const (
	maxHolders = 1024    // engines and stores
	maxTokens  = 1 << 30 // of a prompt
)

// Case is a state with the hits of one prompt.
type Case struct {
	State State
	Ask   Ask
	Names []string // of engines and stores
}

// ParseFile reads a state file for a prompt of some tokens. The calibration may be nil.
func ParseFile(b []byte, tokens int, cal *Calibration) (*Case, error) {
	var f File
	if err := strict(b, &f); err != nil {
		return nil, err
	}
	if cal == nil {
		cal = &Calibration{}
	}
	n := len(f.Engines) + len(f.Stores)
	switch {
	case len(f.Engines) == 0:
		return nil, errors.New("engines: none: name at least one")
	case n > maxHolders:
		return nil, fmt.Errorf("engines and stores: %d, want at most %d", n, maxHolders)
	case tokens < 1 || tokens > maxTokens:
		return nil, fmt.Errorf("tokens: %d, want 1 to %d", tokens, maxTokens)
	case !(f.Overlap >= 0 && f.Overlap <= 1):
		return nil, fmt.Errorf("overlap: %v, want 0 to 1", f.Overlap)
	}
	if err := positive("token_bytes", f.TokenBytes); err != nil {
		return nil, err
	}
	c := &Case{Ask: Ask{Tokens: tokens, TokenBytes: f.TokenBytes, Kinds: AllKinds}}
	c.State.Overlap = f.Overlap
	numbers := map[string]int{}
	holder := func(at, name string, hit int) error {
		if _, twice := numbers[name]; twice {
			return fmt.Errorf("%s.name: %q is there twice", at, name)
		}
		if hit < 0 || hit > maxTokens {
			return fmt.Errorf("%s.hit_tokens: %d, want 0 to %d", at, hit, maxTokens)
		}
		numbers[name] = len(c.Names)
		c.Names, c.Ask.Hits = append(c.Names, name), append(c.Ask.Hits, hit)
		return named(at+".name", name)
	}
	for i := range f.Engines {
		at := fmt.Sprintf("engines[%d]", i)
		e, err := f.Engines[i].engine(at, cal)
		if err = errors.Join(err, holder(at, f.Engines[i].Name, f.Engines[i].Hit)); err != nil {
			return nil, err
		}
		c.State.Engines = append(c.State.Engines, e)
	}
	for i, s := range f.Stores {
		at := fmt.Sprintf("stores[%d]", i)
		if err := errors.Join(holder(at, s.Name, s.Hit),
			notNegative(at+".ready_seconds", s.Ready)); err != nil {
			return nil, err
		}
		c.State.Stores = append(c.State.Stores, Store{s.Ready})
	}
	m := NewMatrix(n)
	c.State.Network = m
	if err := f.learned(m); err != nil {
		return nil, err
	}
	for i, p := range f.Paths {
		at := fmt.Sprintf("paths[%d]", i)
		from, ok := numbers[p.From]
		to, also := numbers[p.To]
		if !ok || !also || to >= len(f.Engines) {
			return nil, fmt.Errorf("%s: from %q to %q: name an engine or a store, and an engine", at,
				p.From, p.To)
		}
		path, err := p.path(at, cal)
		if err != nil {
			return nil, err
		}
		m.Set(from, to, path)
	}
	return c, nil
}

// learned sets the paths from the answers of sidecars.
func (f *File) learned(m *Matrix) error {
	set := func(at string, from int, raw json.RawMessage) error {
		if len(raw) == 0 {
			return nil
		}
		l, err := ParseLinks(raw)
		if err != nil {
			return fmt.Errorf("%s.links: %w", at, err)
		}
		for to := range f.Engines {
			if to != from {
				m.Set(from, to, l.Path(f.Engines[to].Endpoint))
			}
		}
		return nil
	}
	for i := range f.Engines {
		if err := set(fmt.Sprintf("engines[%d]", i), i, f.Engines[i].Links); err != nil {
			return err
		}
	}
	for i := range f.Stores {
		if err := set(fmt.Sprintf("stores[%d]", i), len(f.Engines)+i, f.Stores[i].Links); err != nil {
			return err
		}
	}
	return nil
}

func (e *FileEngine) engine(at string, cal *Calibration) (Engine, error) {
	g := Engine{Wait: e.Wait, PrefillFixed: e.PrefillFixed, PrefillRate: e.PrefillRate, Step: e.Step,
		StepEach: e.StepEach, Running: e.Running, Ready: e.Wait, Arrivals: e.Arrivals}
	switch e.Role {
	case "", "both":
		g.Role = Both
	case "prefill":
		g.Role = Prefill
	case "decode":
		g.Role = Decode
	default:
		return g, fmt.Errorf("%s.role: %q: want both, prefill or decode", at, e.Role)
	}
	if e.Ready != nil {
		g.Ready = *e.Ready
	}
	if e.Prefill != "" {
		line, ok := cal.Find(e.Prefill)
		if !ok {
			return g, unknownLine(at+".prefill", e.Prefill)
		}
		g.PrefillFixed, g.PrefillRate = line.Fixed, line.Rate
	}
	if g.Running < 0 {
		return g, fmt.Errorf("%s.running: %d: want at least 0", at, g.Running)
	}
	return g, errors.Join(notNegative(at+".wait_seconds", g.Wait),
		notNegative(at+".prefill_fixed_seconds", g.PrefillFixed),
		rate(at+".prefill_tokens_per_second", g.PrefillRate, g.Role),
		notNegative(at+".step_seconds", g.Step), notNegative(at+".step_seconds_each", g.StepEach),
		notNegative(at+".ready_seconds", g.Ready),
		notNegative(at+".arrivals_per_second", g.Arrivals))
}

// rate checks a prefill rate. A decode engine needs none.
func rate(field string, v float64, role Role) error {
	if role == Decode {
		return notNegative(field, v)
	}
	return positive(field, v)
}

func (p *FilePath) path(at string, cal *Calibration) (Path, error) {
	x := Path{p.Fixed, p.Rate, p.Before}
	if p.Fabric != "" {
		line, ok := cal.Find(p.Fabric)
		if !ok {
			return x, unknownLine(at+".fabric", p.Fabric)
		}
		x.Fixed, x.Rate = line.Fixed, line.Rate
	}
	return x, errors.Join(notNegative(at+".fixed_seconds", x.Fixed),
		positive(at+".bytes_per_second", x.Rate), notNegative(at+".before_bytes", x.Before))
}

func unknownLine(field, name string) error {
	return fmt.Errorf("%s: %q is not in the calibration file: pass one with --calibration", field,
		name)
}
