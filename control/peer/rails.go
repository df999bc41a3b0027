// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"fmt"
	"math"
	"strings"
	"unicode"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
)

// What a peer may say of a rail.
const (
	MaxGbps = 10_000
	maxMTU  = 1 << 20
	maxNUMA = 1 << 16
)

// CheckRails returns the plausible part of a peer's list of rails, as a copy, and a message for
// each value that it refused. It leaves out rails whose name is too long, empty or used twice, and
// those beyond MaxRails. An implausible speed, MTU or NUMA node counts as unknown.
func CheckRails(rails []*peerv1.Rail) (good []*peerv1.Rail, refused []string) {
	no := func(format string, args ...any) {
		if len(refused) < maxBadRails {
			refused = append(refused, fmt.Sprintf(format, args...))
		}
	}
	seen := map[[2]string]bool{}
	for i, r := range rails {
		id := [2]string{r.GetTransport(), r.GetName()}
		switch {
		case len(good) >= MaxRails:
			no("rails %d to %d: at most %d are kept", i, len(rails)-1, MaxRails)
			return good, refused
		case !plain(id[0]) || !plain(id[1]) || len(r.GetAddress()) > MaxText ||
			strings.ContainsFunc(r.GetAddress(), unicode.IsControl):
			no("rail %d, %.40q: transport or name empty, one of them or the address not printable, or "+
				"over %d bytes", i, id[1], MaxText)
			continue
		case seen[id]:
			no("rail %s: named twice", id[1])
			continue
		}
		seen[id] = true
		k := &peerv1.Rail{Transport: id[0], Name: id[1], Address: r.Address, Gbps: r.Gbps, Mtu: r.Mtu,
			Numa: r.Numa, Down: r.Down}
		if !(k.Gbps >= 0 && k.Gbps <= MaxGbps) || math.IsNaN(k.Gbps) {
			no("rail %s: a speed of %g Gbit/s: 0 to %d", id[1], k.Gbps, MaxGbps)
			k.Gbps = 0
		}
		if k.Mtu > maxMTU {
			no("rail %s: an MTU of %d: at most %d", id[1], k.Mtu, maxMTU)
			k.Mtu = 0
		}
		if k.Numa < -1 || k.Numa > maxNUMA {
			no("rail %s: NUMA node %d: -1 to %d", id[1], k.Numa, maxNUMA)
			k.Numa = -1
		}
		good = append(good, k)
	}
	return good, refused
}

// maxBadRails bounds the messages about one list.
const maxBadRails = 8

func plain(s string) bool {
	return s != "" && len(s) <= MaxText && !strings.ContainsFunc(s,
		func(r rune) bool { return r <= ' ' || r > '~' })
}
