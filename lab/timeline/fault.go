package timeline

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Kind is what goes wrong, or right again.
type Kind string

// Kinds of faults.
const (
	Down      Kind = "down"
	Up        Kind = "up"
	Drop      Kind = "drop"
	AckDrop   Kind = "ackdrop"
	Slow      Kind = "rate" // rate=1/20
	Flap      Kind = "flap" // flap=300ms
	Blackhole Kind = "blackhole"
	Heal      Kind = "heal"
)

var kinds = []Kind{Down, Up, Drop, AckDrop, Slow, Flap, Blackhole, Heal}

// AllRails is the Rail of a fault that meets every one.
const AllRails = -1

// MinFlap is the shortest period of flapping: below it neither a kernel nor a driver follows.
const MinFlap = 20 * time.Millisecond

// Fault is one thing that happens to a rail.
type Fault struct {
	At     time.Duration // after the first transfer began
	Rail   int           // or AllRails
	Kind   Kind
	Share  float64       // Slow: of the rail's rate, in (0, 1]
	Period time.Duration // Flap
}

// ParseFault reads "2s:rail0:down", "1s:all:rate=1/20", "500ms:rail1:flap=300ms".
func ParseFault(s string) (Fault, error) {
	bad := func(format string, args ...any) (Fault, error) {
		return Fault{}, fmt.Errorf("%q: %s", s, fmt.Sprintf(format, args...))
	}
	part := strings.Split(s, ":")
	if len(part) != 3 {
		return bad("want T:railN:kind, for instance 2s:rail0:down")
	}
	at, err := time.ParseDuration(part[0])
	if err != nil || at < 0 {
		return bad("time %q: want a duration after the start, such as 2s or 500ms", part[0])
	}
	f := Fault{At: at, Rail: AllRails}
	if part[1] != "all" {
		num, ok := strings.CutPrefix(part[1], "rail")
		n, err := strconv.ParseUint(num, 10, 16)
		if !ok || err != nil {
			return bad("rail %q: want rail0, rail1 ... or all", part[1])
		}
		f.Rail = int(n)
	}
	kind, value, has := strings.Cut(part[2], "=")
	f.Kind = Kind(kind)
	switch {
	case !slices.Contains(kinds, f.Kind):
		return bad("kind %q: want one of %s", kind, kindList())
	case f.Kind == Slow:
		if f.Share, err = parseShare(value); err != nil {
			return bad("rate %q: want a share of the rail's rate above 0 and at most 1, such as rate=1/20",
				value)
		}
	case f.Kind == Flap:
		if f.Period, err = time.ParseDuration(value); err != nil || f.Period < MinFlap {
			return bad("flap %q: want a period of %s or more, such as flap=300ms", value, MinFlap)
		}
	case has:
		return bad("kind %s takes no value", kind)
	}
	return f, nil
}

func kindList() string {
	var s []string
	for _, k := range kinds {
		s = append(s, string(k))
	}
	return strings.Join(s, ", ")
}

func parseShare(s string) (float64, error) {
	num, den, frac := strings.Cut(s, "/")
	v, err := strconv.ParseFloat(num, 64)
	if err == nil && frac {
		var d float64
		d, err = strconv.ParseFloat(den, 64)
		v /= d
	}
	if err == nil && !(v > 0 && v <= 1) {
		err = strconv.ErrRange
	}
	return v, err
}

// RailName is what the fault calls its rail.
func (f Fault) RailName() string {
	if f.Rail == AllRails {
		return "all"
	}
	return "rail" + strconv.Itoa(f.Rail)
}

// String is the form that ParseFault reads.
func (f Fault) String() string {
	s := f.At.String() + ":" + f.RailName() + ":" + string(f.Kind)
	switch f.Kind {
	case Slow:
		s += "=" + strconv.FormatFloat(f.Share, 'g', -1, 64)
		if n := 1 / f.Share; n == float64(int(n)) {
			s = s[:strings.LastIndexByte(s, '=')] + "=1/" + strconv.Itoa(int(n))
		}
	case Flap:
		s += "=" + f.Period.String()
	}
	return s
}

// MarshalText implements encoding.TextMarshaler.
func (f Fault) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (f *Fault) UnmarshalText(b []byte) (err error) {
	*f, err = ParseFault(string(b))
	return err
}

// Meets reports whether the fault is of this rail.
func (f Fault) Meets(rail int) bool { return f.Rail == AllRails || f.Rail == rail }

// Sort puts faults in the order of their times; those of one time stay as they were given.
func Sort(f []Fault) {
	slices.SortStableFunc(f, func(a, b Fault) int { return cmp.Compare(a.At, b.At) })
}

// Condition is what faults have made of a rail.
type Condition struct {
	Down, Drop, AckDrop, Blackholed bool
	Flap                            time.Duration // 0: it does not
	Share                           float64       // of its rate
}

// Healthy is a rail that nothing happened to.
var Healthy = Condition{Share: 1}

// After is the condition once f has happened to the rail.
func (c Condition) After(f Fault) Condition {
	switch f.Kind {
	case Down:
		c.Down = true
	case Up:
		c.Down, c.Flap = false, 0
	case Drop:
		c.Drop = true
	case AckDrop:
		c.AckDrop = true
	case Slow:
		c.Share = f.Share
	case Flap:
		c.Flap = f.Period
	case Blackhole:
		c.Blackholed = true
	case Heal:
		c = Healthy
	}
	return c
}

// Usable is the share of its rate that a sprayer can count on: none where bytes or their
// confirmations get lost, and none of a rail that flaps, whose times are unpredictable.
func (c Condition) Usable() float64 {
	if c.Down || c.Drop || c.AckDrop || c.Blackholed || c.Flap > 0 {
		return 0
	}
	return c.Share
}

// whole is 1 of a rail to which nothing has happened, and 0 of any other.
func (c Condition) whole() float64 {
	if c == Healthy {
		return 1
	}
	return 0
}

// delivers is 1 of a rail whose bytes come and are known to have come, if not always or not fast.
func (c Condition) delivers() float64 {
	if c.Down || c.Drop || c.AckDrop || c.Blackholed {
		return 0
	}
	return 1
}

// ConditionAt is the condition of a rail at a time, faults of that very time included.
func ConditionAt(faults []Fault, rail int, at time.Duration) Condition {
	c := Healthy
	for _, f := range faults {
		if f.At <= at && f.Meets(rail) {
			c = c.After(f)
		}
	}
	return c
}
