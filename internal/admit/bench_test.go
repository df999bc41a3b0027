package admit

import (
	"fmt"
	"net"
	"testing"
)

// BenchmarkFlood is one arrival at a full gate of 1,024 connections: from 10,000 IPv4 addresses in
// turn, and from as many addresses of IPv6 /64 networks that have 128 connections each.
func BenchmarkFlood(b *testing.B) {
	const held, sources = 1024, 10_000
	for _, c := range []struct {
		name string
		addr func(i int) string
	}{
		{"IPv4", func(i int) string { return net.IPv4(10, 1, byte(i>>8), byte(i)).String() }},
		{"IPv6", func(i int) string { return fmt.Sprintf("2001:db8:0:%x::%x", i%10, i/10) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			g := New(Limits{Unproved: held, PerSource: 128}, nil)
			conns := make([]*conn, sources)
			for i := range conns {
				conns[i] = &conn{from: c.addr(i)}
				g.Enter(conns[i])
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				g.Enter(conns[i%sources])
				i++
			}
			if n := g.Held(); n < held/2 || n > held {
				b.Fatalf("%d connections held", n)
			}
		})
	}
}
