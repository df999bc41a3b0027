package route

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func here(name, prefix string) Rail {
	r := Rail{Transport: "tcp", Name: name}
	if prefix != "" {
		r.Prefix = netip.MustParsePrefix(prefix)
	}
	return r
}

func there(name, addr string) Rail { return Rail{Transport: "tcp", Name: name, Address: addr} }

func TestPairs(t *testing.T) {
	for _, x := range []struct {
		name   string
		local  []Rail
		remote []Rail
		want   string
	}{
		{"nobody", nil, []Rail{there("a", "10.0.0.2:1")}, ""},
		{"in order", []Rail{here("a", ""), here("b", "")}, []Rail{there("x", "10.0.0.2:1"),
			there("y", "10.0.1.2:1")}, "a>x b>y"},
		{"more here", []Rail{here("a", ""), here("b", ""), here("c", "")},
			[]Rail{there("x", "10.0.0.2:1"), there("y", "10.0.1.2:1")}, "a>x b>y c>x"},
		{"more there", []Rail{here("a", "")}, []Rail{there("x", "10.0.0.2:1"), there("y", "10.0.1.2:1")},
			"a>x a>y"},
		{"by link, whatever the order", []Rail{here("a", "10.0.0.1/24"), here("b", "10.0.1.1/24")},
			[]Rail{there("y", "10.0.1.2:1"), there("x", "10.0.0.2:1")},
			"a=x b=y"},
		{"one went", []Rail{here("b", "10.0.1.1/24")}, []Rail{there("x", "10.0.0.2:1"),
			there("y", "10.0.1.2:1")}, "b=y b>x"},
		{"several on one link", []Rail{here("a", "10.0.0.1/16"), here("b", "10.0.1.1/16")},
			[]Rail{there("x", "10.0.0.2:1"), there("y", "10.0.1.2:1")}, "a=x b=y"},
		{"six", []Rail{here("a", "2001:db8::1/64")}, []Rail{there("x", "[2001:db8::2]:1")}, "a=x"},
		{"nonsense", []Rail{here("a", "10.0.0.1/24")}, []Rail{there("x", "no address")}, "a>x"},
	} {
		var got []string
		for _, p := range Pairs(x.local, x.remote) {
			sign := ">"
			if p.OnLink {
				sign = "="
			}
			got = append(got, x.local[p.Local].Name+sign+x.remote[p.Remote].Name)
		}
		if s := strings.Join(got, " "); s != x.want {
			t.Errorf("%s: %q, want %q", x.name, s, x.want)
		}
	}
	var many []Rail
	for i := range 10000 {
		many = append(many, there(fmt.Sprint(i), "10.0.0.1:1"))
	}
	if n := len(Pairs(of(many, "tcp"), of(many, "tcp"))); n != MaxPairs {
		t.Errorf("%d pairs", n)
	}
}

func TestRank(t *testing.T) {
	shm, gdr, tcp := Transport{Name: "shm", SameHost: true, Device: true}, Transport{Name: "gdr",
		Rank: 1, Device: true}, Transport{Name: "tcp", Rank: 2}
	rail := func(transport, name string, tier int, gbps float64, down bool) Rail {
		return Rail{Transport: transport, Name: name, Tier: tier, Gbps: gbps, Down: down,
			Address: "10.0.0.2:1"}
	}
	in := Input{Transports: []Transport{shm, gdr, tcp},
		Local: []Rail{rail("shm", "shm", 1, 0, false), rail("tcp", "eth0", 2, 100, false),
			rail("tcp", "eth1", 3, 400, false), rail("tcp", "eth2", 2, 100, true),
			rail("gdr", "mlx5_0", 1, 400, false)},
		Remote: []Rail{rail("shm", "shm", 1, 0, false), rail("tcp", "eth0", 2, 25, false),
			rail("tcp", "eth1", 2, 400, false), rail("tcp", "eth2", 2, 100, false),
			rail("gdr", "mlx5_0", 1, 400, false)}}
	check := func(what string, want ...string) {
		t.Helper()
		var got []string
		for _, c := range Rank(in) {
			s := fmt.Sprintf("%s %s %s>%s tier %d", c.Kind, c.Transport, c.Local, c.Remote, c.Tier)
			if !c.Usable() {
				s += ": " + c.Why
			}
			got = append(got, s)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s:\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
	check("host memory, two hosts", "direct gdr mlx5_0>mlx5_0 tier 1", "direct tcp eth0>eth0 tier 2",
		"direct tcp eth1>eth1 tier 3",
		"direct shm shm>shm tier 1: shm works within one host, and the peer is on another one",
		"direct tcp eth2>eth2 tier 2: the link of eth2 is down")
	in.SameHost = true
	check("host memory, one host", "direct shm shm>shm tier 1", "direct gdr mlx5_0>mlx5_0 tier 1",
		"direct tcp eth0>eth0 tier 2",
		"direct tcp eth1>eth1 tier 3",
		"direct tcp eth2>eth2 tier 2: the link of eth2 is down")
	in.SameHost, in.Device = false, true
	check("GPU memory", "direct gdr mlx5_0>mlx5_0 tier 1", "staged tcp eth0>eth0 tier 2",
		"staged tcp eth1>eth1 tier 3",
		"direct shm shm>shm tier 1: shm works within one host, and the peer is on another one",
		"staged tcp eth2>eth2 tier 2: the link of eth2 is down")
}

// A peer cannot make the list long.
func TestBounds(t *testing.T) {
	in := Input{Transports: []Transport{{Name: "tcp"}}, Local: []Rail{here("a", "")}}
	for i := range 10000 {
		in.Remote = append(in.Remote, there(fmt.Sprint(i), "x"))
	}
	if n := len(Rank(in)); n != MaxPairs {
		t.Errorf("%d candidates", n)
	}
}
