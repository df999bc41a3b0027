package proxy

import (
	"errors"
	"strings"
	"testing"
	"time"
)

// A peer or sidecar that is another engine's is warned of, and the configured peer stays.
func TestIdentityWarns(t *testing.T) {
	const own, other, port, url = "127.0.0.1:7650", "127.0.0.2:7650", "127.0.0.1:7660", "http://s"
	for _, c := range []struct {
		name                  string
		peer, engine, sidecar string // endpoints: configured, of the engine, of the sidecar
		warning, key          string
	}{
		{"by its engine", own, other, "", "set peer to " + other, "peer"},
		{"another port", own, port, "", "set peer to " + port, "peer"},
		{"by its sidecar", own, "", other, "or correct sidecar " + url, "peer"},
		{"right, and the sidecar is another's", own, own, other,
			"sidecar is " + url + ", whose endpoint is " + other, "sidecar"},
		{"right", other, other, other, "", ""},
		{"nothing is known", own, "", "", "", ""},
		{"asked for", "", other, other, "", ""},
		{"asked of another's", "", own, other, "sidecar is " + url + ", whose endpoint is " + other,
			"sidecar"},
	} {
		// A sidecar that answers only after the comparison is compared, too.
		for _, late := range []bool{false, true} {
			i := identity{role: rolePrefill, sidecar: url, configured: c.peer != "", endpoint: c.peer,
				engineEndpoint: c.engine}
			key := ""
			compare := func() {
				if x, due := i.toCompare(); due {
					key = ""
					if y := i.compared(x, x.used == x.reported,
						x.sidecar == "" || x.sidecar == x.reported); y != nil {
						key = y.key
					}
				}
				if _, due := i.toCompare(); due {
					t.Errorf("%s: compared twice", c.name)
				}
			}
			if late {
				i.asked("", errors.New("503"), false, false)
				compare()
			}
			if c.sidecar != "" {
				i.asked(c.sidecar, nil, true, false)
			}
			compare()
			if got := i.warnings(); (got == "") != (c.warning == "") || !strings.Contains(got, c.warning) ||
				key != c.key {
				t.Errorf("%s, late %v: got key %q, warning %q; want %q, %q", c.name, late, key, got, c.key,
					c.warning)
			}
			if c.peer != "" && i.endpoint != c.peer {
				t.Errorf("%s: endpoint %s, want %s", c.name, i.endpoint, c.peer)
			}
		}
	}
}

// The mark of a leaving engine outlives a sidecar without an answer, until its time or the engine
// ends.
func TestIdentityLeaving(t *testing.T) {
	begin := time.Unix(1000, 0)
	leaves := func(i *identity, _ time.Time) { i.answered(begin, true) }
	stays := func(i *identity, now time.Time) { i.answered(now, false) }
	silent := func(i *identity, now time.Time) { i.unanswered(now) }
	ends := func(i *identity, _ time.Time) { i.ended() }
	for _, c := range []struct {
		name  string
		after time.Duration
		steps []func(*identity, time.Time)
		want  bool
	}{
		{"it leaves", 0, []func(*identity, time.Time){leaves}, true},
		{"it stays again", 0, []func(*identity, time.Time){leaves, stays}, false},
		{"no answer", leavingFor - 1, []func(*identity, time.Time){leaves, silent}, true},
		{"no answer for long", leavingFor, []func(*identity, time.Time){leaves, silent}, false},
		{"the engine ends", 0, []func(*identity, time.Time){leaves, silent, ends}, false},
		{"its sidecar answers at its end", 0, []func(*identity, time.Time){leaves, ends}, true},
	} {
		i := identity{role: roleDecode}
		for _, step := range c.steps {
			step(&i, begin.Add(c.after))
		}
		if i.leaving != c.want {
			t.Errorf("%s: leaving %v, want %v", c.name, i.leaving, c.want)
		}
	}
}
