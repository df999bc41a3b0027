package hello

import (
	"fmt"
	"math"
	"strings"
	"unicode"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
)

const maxGbps = 10_000 // of a rail

// maxRailMessages bounds the messages about one list.
const maxRailMessages = 8

// CheckRails returns the plausible part of a peer's list of rails, as a copy, and a message for
// each value that it refused. It leaves out rails whose name is too long, empty or used twice, and
// those beyond MaxRails. An implausible speed counts as unknown.
func CheckRails(rails []*peerv1.Rail) (good []*peerv1.Rail, refused []string) {
	refuse := func(format string, args ...any) {
		if len(refused) < maxRailMessages {
			refused = append(refused, fmt.Sprintf(format, args...))
		}
	}
	seen := map[[2]string]bool{}
	for i, r := range rails {
		id := [2]string{r.GetTransport(), r.GetName()}
		switch {
		case len(good) >= MaxRails:
			refuse("rails %d to %d: at most %d are kept", i, len(rails)-1, MaxRails)
			return good, refused
		case !isName(id[0]) || !isName(id[1]) || len(r.GetAddress()) > MaxText ||
			strings.ContainsFunc(r.GetAddress(), unicode.IsControl):
			refuse("rail %d, %.40q: transport or name empty, one of them or the address not printable, "+
				"or over %d bytes", i, id[1], MaxText)
			continue
		case seen[id]:
			refuse("rail %s: named twice", id[1])
			continue
		}
		seen[id] = true
		k := &peerv1.Rail{Transport: id[0], Name: id[1], Address: r.Address, Gbps: r.Gbps,
			Down: r.Down}
		if !(k.Gbps >= 0 && k.Gbps <= maxGbps) || math.IsNaN(k.Gbps) {
			refuse("rail %s: a speed of %g Gbit/s: 0 to %d", id[1], k.Gbps, maxGbps)
			k.Gbps = 0
		}
		good = append(good, k)
	}
	return good, refused
}

func isName(s string) bool { return s != "" && len(s) <= MaxText && isPrintable(s) }

// isPrintable reports whether s has only printable ASCII without spaces: logs and terminals show
// texts of peers.
func isPrintable(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r > '~' })
}
