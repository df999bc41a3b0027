package config

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Duration is a time.Duration written with its unit: "30s", "500ms", "2m".
type Duration time.Duration

// D returns the standard type.
func (d Duration) D() time.Duration { return time.Duration(d) }

func (d Duration) String() string { return time.Duration(d).String() }

// Size is a number of bytes written with its unit: "64KiB", "1MiB", "4096B".
type Size uint64

func (s Size) String() string { return formatUnits(uint64(s), sizeUnits) }

// Portion is a part of a tier: a Size, or a percentage such as "50%". Nothing is no limit.
type Portion string

// Of is the portion of a total; 0: no limit. The portion was checked when it was read.
func (p Portion) Of(total Size) uint64 {
	if digits, ok := strings.CutSuffix(string(p), "%"); ok {
		n, _ := strconv.ParseUint(strings.TrimSpace(digits), 10, 8)
		return uint64(total) * n / 100
	}
	n, _ := parseUnits(string(p), sizeUnits)
	return n
}

var errPortion = errors.New("a size, or a percentage of 1% to 100%")

func parsePortion(text string) (Portion, error) {
	if digits, ok := strings.CutSuffix(text, "%"); ok {
		n, err := strconv.ParseUint(strings.TrimSpace(digits), 10, 8)
		if err != nil || n < 1 || n > 100 {
			return "", errPortion
		}
		return Portion(text), nil
	}
	if _, err := parseUnits(text, sizeUnits); err != nil {
		return "", errPortion
	}
	return Portion(text), nil
}

// Rate is a number of bits per second: "10gbit", "500mbit".
type Rate uint64

func (r Rate) String() string { return formatUnits(uint64(r), rateUnits) }

type unit struct {
	name  string
	scale uint64
}

// Largest first, so that formatting picks the largest that divides.
var (
	sizeUnits = []unit{{"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20},
		{"KiB", 1 << 10}, {"B", 1}}
	rateUnits = []unit{{"gbit", 1e9}, {"mbit", 1e6}, {"kbit", 1e3}, {"bit", 1}}
)

func formatUnits(v uint64, units []unit) string {
	for _, u := range units {
		if v != 0 && v%u.scale == 0 {
			return strconv.FormatUint(v/u.scale, 10) + u.name
		}
	}
	return "0" + units[len(units)-1].name
}

var errUnits = errors.New("a number with its unit")

// parseUnits reads a number and one of the units. It refuses a bare number, whose unit would be a
// guess.
func parseUnits(text string, units []unit) (uint64, error) {
	for _, u := range units {
		digits, ok := cutSuffixFold(text, u.name)
		if !ok {
			continue
		}
		digits = strings.TrimSpace(digits)
		f, err := strconv.ParseFloat(digits, 64)
		if err != nil {
			continue // "KiB" also ends in "B"
		}
		v := f * float64(u.scale)
		if math.IsNaN(v) || v < 0 || v >= 1<<63 || v != math.Trunc(v) {
			return 0, fmt.Errorf("%w, whole and not negative", errUnits)
		}
		return uint64(v), nil
	}
	return 0, errUnits
}

func cutSuffixFold(s, suffix string) (string, bool) {
	if len(s) < len(suffix) || !strings.EqualFold(s[len(s)-len(suffix):], suffix) {
		return s, false
	}
	return s[:len(s)-len(suffix)], true
}
