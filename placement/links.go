package placement

import (
	"encoding/json"
	"fmt"
	"math"

	"github.com/kvspray/kvspray/internal/nodeapi"
)

// Links is a sidecar's answer to GET /v1/links: learned rates from its node to each peer.
type Links nodeapi.Links

// ParseLinks reads an answer.
func ParseLinks(b []byte) (*Links, error) {
	if len(b) > MaxFile {
		return nil, tooLarge(len(b))
	}
	var l Links
	if err := json.Unmarshal(b, &l); err != nil {
		return nil, fmt.Errorf("not an answer of /v1/links: %w", err)
	}
	return &l, nil
}

// Path is the path to the peer with an endpoint; its Rate is 0 if no link to it is usable. It has
// the prediction of docs/protocol.md, section 8: the lowest fixed time, and the sum of the rates.
func (l *Links) Path(endpoint string) Path {
	for _, p := range l.Peers {
		if endpoint == "" || p.Endpoint != endpoint && p.Claimed != endpoint {
			continue
		}
		// A transfer of layers waits for both urgent priorities.
		path := Path{Fixed: math.Inf(1),
			Before: float64(p.Waiting["decode_waits"]) + float64(p.Waiting["layer_stream"])}
		for _, x := range p.Links {
			path.Before += float64(x.InFlight)
			if (x.State == "healthy" || x.State == "readmitted") && x.Rate > 0 {
				path.Fixed, path.Rate = min(path.Fixed, x.Fixed), path.Rate+x.Rate
			}
		}
		if !(path.Rate > 0) || !(path.Fixed >= 0) || !(path.Before >= 0) || math.IsInf(path.Rate, 0) {
			return Path{}
		}
		return path
	}
	return Path{}
}

// Matrix is a Network of stored paths.
type Matrix struct {
	n     int
	paths []Path
}

// NewMatrix makes a network of n holders without paths.
func NewMatrix(n int) *Matrix { return &Matrix{n, make([]Path, n*n)} }

// Path implements Network.
func (m *Matrix) Path(from, to int) Path { return m.paths[from*m.n+to] }

// Set changes one path.
func (m *Matrix) Set(from, to int, p Path) { m.paths[from*m.n+to] = p }
