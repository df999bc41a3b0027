package placement

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Fabric is a line: a fixed time and a rate. It describes a fabric (bytes) or an engine's prefill
// (tokens).
type Fabric struct {
	Name  string  `json:"name"`
	Fixed float64 `json:"fixed_seconds"`
	Rate  float64 `json:"per_second"` // bytes or tokens
	// Error is the mean of |predicted - measured| / measured over the samples.
	Error   float64 `json:"error"`
	Samples int     `json:"samples"`
}

// Time is the predicted time of an amount.
func (f Fabric) Time(amount float64) float64 { return f.Fixed + amount/f.Rate }

// PublishedFabrics are those of Table 2 of arXiv 2606.01502, with the table's errors over all
// amounts. The rate is that of one thread block, not of the link: NVLink 4 gives 125 GB/s to many.
func PublishedFabrics() []Fabric {
	return []Fabric{
		{Name: "h100-ibgda-ndr200", Fixed: 16e-6, Rate: 25e9, Error: 0.16},
		{Name: "h100-nvlink4", Fixed: 1.2e-6, Rate: 21e9, Error: 0.18},
		{Name: "a100-nvlink3", Fixed: 1.6e-6, Rate: 18e9, Error: 0.22},
		{Name: "rtx6000-pcie5", Fixed: 4.8e-6, Rate: 22e9, Error: 0.07},
		{Name: "a40-pcie4", Fixed: 8.7e-6, Rate: 19e9, Error: 0.16},
	}
}

// Sample is one measurement: an amount took some seconds.
type Sample struct {
	Name            string
	Amount, Seconds float64
}

// Bounds of files.
const (
	MaxFile    = 16 << 20 // bytes of a state, calibration or sample file
	maxFabrics = 4096
	maxName    = 128 // bytes
)

// Fit fits one line to samples of at least two amounts. The errors it minimizes are relative, so
// that short times count as much as long ones. The fixed time is not negative.
func Fit(name string, samples []Sample) (Fabric, error) {
	f := Fabric{Name: name, Samples: len(samples)}
	// Weighted least squares of seconds = fixed + slope*amount, weight 1/seconds^2.
	var w, wx, wxx, wy, wxy float64
	for _, s := range samples {
		k := 1 / (s.Seconds * s.Seconds)
		w, wx, wxx = w+k, wx+k*s.Amount, wxx+k*s.Amount*s.Amount
		wy, wxy = wy+k*s.Seconds, wxy+k*s.Amount*s.Seconds
	}
	det := w*wxx - wx*wx
	if len(samples) < 2 || det <= 1e-12*w*wxx {
		return f, fmt.Errorf("%s: %d samples of one amount: measure at least two amounts, for instance "+
			"1 and 1048576 bytes", name, len(samples))
	}
	slope := (w*wxy - wx*wy) / det
	f.Fixed = (wy - slope*wx) / w
	if f.Fixed < 0 {
		f.Fixed, slope = 0, wxy/wxx
	}
	if slope <= 0 {
		return f, fmt.Errorf("%s: larger amounts took no longer: measure larger ones", name)
	}
	f.Rate = 1 / slope
	for _, s := range samples {
		f.Error += math.Abs(f.Time(s.Amount)-s.Seconds) / s.Seconds / float64(len(samples))
	}
	return f, nil
}

// Calibration is the calibration file.
type Calibration struct {
	Fabrics []Fabric `json:"fabrics"` // by name
}

// Find returns a fabric by its name.
func (c *Calibration) Find(name string) (Fabric, bool) {
	for _, f := range c.Fabrics {
		if f.Name == name {
			return f, true
		}
	}
	return Fabric{}, false
}

// ParseCalibration reads a calibration file.
func ParseCalibration(b []byte) (*Calibration, error) {
	var c Calibration
	if err := strict(b, &c); err != nil {
		return nil, err
	}
	if len(c.Fabrics) > maxFabrics {
		return nil, fmt.Errorf("fabrics: %d, want at most %d", len(c.Fabrics), maxFabrics)
	}
	for i, f := range c.Fabrics {
		at := fmt.Sprintf("fabrics[%d]", i)
		if err := errors.Join(named(at, f.Name), notNegative(at+".fixed_seconds", f.Fixed),
			positive(at+".per_second", f.Rate)); err != nil {
			return nil, err
		}
		if g, _ := c.Find(f.Name); g != f {
			return nil, fmt.Errorf("%s.name: %q is there twice", at, f.Name)
		}
	}
	return &c, nil
}

// ParseSamples reads lines "NAME AMOUNT SECONDS", separated by commas or blanks. Empty lines, and
// those that begin with #, have no sample.
func ParseSamples(b []byte) ([]Sample, error) {
	if len(b) > MaxFile {
		return nil, tooLarge(len(b))
	}
	var list []Sample
	n := 0
	for line := range strings.Lines(string(b)) {
		n++
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		f := strings.FieldsFunc(line, func(r rune) bool { return r == ',' || r == ' ' || r == '\t' })
		if len(f) != 3 {
			return nil, fmt.Errorf("line %d: %d fields: write NAME AMOUNT SECONDS", n, len(f))
		}
		amount, aerr := strconv.ParseFloat(f[1], 64)
		seconds, serr := strconv.ParseFloat(f[2], 64)
		if err := errors.Join(aerr, serr, named("name", f[0]), notNegative("amount", amount),
			positive("seconds", seconds)); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		list = append(list, Sample{f[0], amount, seconds})
	}
	return list, nil
}

// Calibrate fits a line for each name.
func Calibrate(samples []Sample) (*Calibration, error) {
	by := map[string][]Sample{}
	for _, s := range samples {
		by[s.Name] = append(by[s.Name], s)
	}
	if len(by) == 0 {
		return nil, errors.New("no samples: write lines of NAME AMOUNT SECONDS")
	}
	if len(by) > maxFabrics {
		return nil, fmt.Errorf("%d names, want at most %d", len(by), maxFabrics)
	}
	c := &Calibration{}
	for name, list := range by {
		f, err := Fit(name, list)
		if err != nil {
			return nil, err
		}
		c.Fabrics = append(c.Fabrics, f)
	}
	slices.SortFunc(c.Fabrics, func(a, b Fabric) int { return strings.Compare(a.Name, b.Name) })
	return c, nil
}

// strict decodes JSON without unknown fields.
func strict(b []byte, into any) error {
	if len(b) > MaxFile {
		return tooLarge(len(b))
	}
	d := json.NewDecoder(strings.NewReader(string(b)))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("not the JSON that docs/placement.md describes: %w", err)
	}
	if d.More() {
		return errors.New("more than one JSON value: write one object")
	}
	return nil
}

func tooLarge(n int) error { return fmt.Errorf("%d bytes: want at most %d", n, MaxFile) }

func named(field, name string) error {
	if name == "" || len(name) > maxName {
		return fmt.Errorf("%s: a name of %d bytes: want 1 to %d", field, len(name), maxName)
	}
	return nil
}

func notNegative(field string, v float64) error {
	if !(v >= 0) || math.IsInf(v, 0) {
		return fmt.Errorf("%s: %v: want a number of at least 0", field, v)
	}
	return nil
}

func positive(field string, v float64) error {
	if !(v > 0) || math.IsInf(v, 0) {
		return fmt.Errorf("%s: %v: want a number above 0", field, v)
	}
	return nil
}
