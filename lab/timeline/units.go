package timeline

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Rate is bits per second.
type Rate float64

// Bounds of what may be asked for.
const (
	MinRate Rate = 1e6   // below it a 64 KiB chunk takes half a second
	MaxRate Rate = 800e9 // above any NIC's
)

var rateUnits = []struct {
	suffix string
	bits   Rate
}{{"gbit", 1e9}, {"mbit", 1e6}, {"kbit", 1e3}}

// ParseRate reads "500mbit", "2gbit", "2.5gbit".
func ParseRate(s string) (Rate, error) {
	for _, u := range rateUnits {
		num, ok := strings.CutSuffix(s, u.suffix)
		if !ok {
			continue
		}
		v, err := strconv.ParseFloat(num, 64)
		if err != nil || math.IsNaN(v) {
			break
		}
		r := Rate(v) * u.bits
		if r < MinRate || r > MaxRate {
			return 0, fmt.Errorf("%q: must be %s to %s", s, MinRate, MaxRate)
		}
		return r, nil
	}
	return 0, fmt.Errorf("%q: want a rate such as 500mbit or 2gbit", s)
}

// String is the form that ParseRate reads.
func (r Rate) String() string {
	for _, u := range rateUnits {
		if r >= u.bits {
			return strconv.FormatFloat(float64(r/u.bits), 'g', 6, 64) + u.suffix
		}
	}
	return strconv.FormatFloat(float64(r)/1e3, 'g', 6, 64) + "kbit"
}

// Over is what the rate moves in d, in bytes.
func (r Rate) Over(d time.Duration) float64 { return float64(r) / 8 * d.Seconds() }

// RateOf is the rate of n bytes in d; 0 where d is.
func RateOf(n uint64, d time.Duration) Rate {
	if d <= 0 {
		return 0
	}
	return Rate(float64(n) * 8 / d.Seconds())
}

var sizeUnits = []struct {
	suffix string
	shift  int
}{{"KiB", 10}, {"MiB", 20}, {"GiB", 30}}

// maxSize bounds what ParseSize takes.
const maxSize = 1 << 44

// ParseSize reads "16KiB", "256MiB", "4096".
func ParseSize(s string) (int64, error) {
	num, shift := s, 0
	for _, u := range sizeUnits {
		if n, ok := strings.CutSuffix(s, u.suffix); ok {
			num, shift = n, u.shift
			break
		}
	}
	v, err := strconv.ParseInt(num, 10, 64)
	if err != nil || v <= 0 {
		return 0, fmt.Errorf("%q: want a size such as 16KiB or 256MiB", s)
	}
	if v > maxSize>>shift {
		return 0, fmt.Errorf("%q: more than %s", s, FormatSize(maxSize))
	}
	return v << shift, nil
}

// FormatSize is the shortest form that ParseSize reads.
func FormatSize(n int64) string {
	for i := len(sizeUnits) - 1; i >= 0; i-- {
		if u := sizeUnits[i]; n > 0 && n%(1<<u.shift) == 0 {
			return strconv.FormatInt(n>>u.shift, 10) + u.suffix
		}
	}
	return strconv.FormatInt(n, 10)
}

// Seconds is a duration that JSON shows in seconds.
type Seconds time.Duration

// D is the duration.
func (s Seconds) D() time.Duration { return time.Duration(s) }

// String implements fmt.Stringer.
func (s Seconds) String() string { return time.Duration(s).String() }

// MarshalJSON implements json.Marshaler.
func (s Seconds) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(s).Seconds()) }

// UnmarshalJSON implements json.Unmarshaler.
func (s *Seconds) UnmarshalJSON(b []byte) error {
	var v float64
	if err := json.Unmarshal(b, &v); err != nil {
		return err
	}
	if math.Abs(v) > 1e9 {
		return fmt.Errorf("timeline: %g seconds: out of range", v)
	}
	*s = Seconds(math.Round(v * 1e9))
	return nil
}
