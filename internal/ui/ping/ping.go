// Package ping is `kvspray ping`: does a sidecar at an address answer, does it accept this node's
// key, how long does it take, and over which rails does the sidecar of this host reach it? It makes
// one connection as sidecars do, and asks the local sidecar for what it has learned of the peer.
//
// No goroutines but those of gRPC, which end with Run.
package ping

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
	"unicode"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/control/peer/rpc"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/ui/ask"
)

// Bounds of a run.
const (
	MaxCount    = 100
	hostSilence = 7 * time.Second
)

// Options are what to ping.
type Options struct {
	Peer   string // host:port, or the node name of a peer of the local sidecar
	Count  int
	Config *config.Config // keys, and http.listen of the local sidecar
}

// Report is the result. Times are in seconds.
type Report struct {
	Endpoint string    `json:"endpoint"`
	Node     string    `json:"node"`
	Boot     string    `json:"boot"`
	Version  string    `json:"version"`
	Secured  bool      `json:"secured"`         // by key or certificate
	Connect  float64   `json:"connect_seconds"` // TCP, TLS and the first answer
	RTT      []float64 `json:"rtt_seconds"`
	MTU      int       `json:"mtu_bytes,omitempty"` // of the path, as this host's kernel has it
	// what the local sidecar has learned; nil if none runs or has met the peer
	Rails []nodeapi.Link `json:"rails"`
	Local string         `json:"local,omitempty"` // why Rails is empty
}

// Run pings the peer.
func Run(ctx context.Context, o Options) (*Report, error) {
	peers, local := localPeers(ctx, o.Config)
	r := &Report{Endpoint: o.Peer, Secured: o.Config.Secured()}
	if _, _, err := net.SplitHostPort(o.Peer); err != nil {
		i := slices.IndexFunc(peers, func(p nodeapi.PeerLinks) bool { return p.Node == o.Peer })
		if i < 0 {
			if local == nil {
				local = errors.New("the local sidecar has no peer of that name")
			}
			return nil, fmt.Errorf("ping: %q: not host:port, and no node: %w", o.Peer, local)
		}
		if r.Endpoint = peers[i].Endpoint; r.Endpoint == "" {
			r.Endpoint = peers[i].Claimed
		}
	}
	p := &o.Config.Peer
	credentials, err := keys.Load(p.ClusterKeyFile, p.TLS.Cert, p.TLS.Key, p.TLS.CA, "kvspray-ping",
		time.Now())
	if err != nil {
		return nil, fmt.Errorf("ping: %w", err)
	}
	caller := rpc.Caller{Credentials: credentials, HostSilence: hostSilence}
	start := time.Now()
	var first *peerv1.ProbeReply
	for range o.Count {
		// A connection of its own: a call has a bounded time.
		err := caller.Call(ctx, r.Endpoint, r.probe(&start, &first))
		switch {
		case err == nil:
		case errors.Is(err, rpc.ErrNoAnswer) && !errors.Is(err, syscall.ECONNREFUSED):
			return nil, fmt.Errorf("ping: %w; is it a sidecar's peer.listen, with the key of "+
				"peer.cluster_key_file or peer.tls here (--config)?", err)
		default:
			return nil, fmt.Errorf("ping: %w", err)
		}
		start = time.Now()
	}
	r.Node, r.Version = first.GetNode(), first.GetVersion()
	r.Boot = hex.EncodeToString(first.GetBoot())
	r.MTU = mtu(ctx, r.Endpoint)
	for _, p := range peers {
		if p.Boot == r.Boot {
			r.Rails = p.Links
		}
	}
	switch {
	case local != nil:
		r.Local = local.Error()
	case len(r.Rails) == 0:
		r.Local = "the local sidecar has no rails to it yet: a request or gossip names a peer"
	}
	return r, nil
}

// probe makes two calls on one connection: the second one's time is a round trip.
func (r *Report) probe(start *time.Time, first **peerv1.ProbeReply) func(context.Context,
	peerv1.PeerClient) error {
	return func(ctx context.Context, c peerv1.PeerClient) error {
		reply, err := c.Probe(ctx, &peerv1.ProbeRequest{})
		if err != nil {
			return err //nolint:wrapcheck // Call adds what was called
		}
		if *first == nil {
			*first, r.Connect = reply, time.Since(*start).Seconds()
		}
		sent := time.Now()
		if _, err := c.Probe(ctx, &peerv1.ProbeRequest{}); err != nil {
			return err //nolint:wrapcheck // as above
		}
		r.RTT = append(r.RTT, time.Since(sent).Seconds())
		return nil
	}
}

// localPeers are the peers that the sidecar of this host has met, or why there are none.
func localPeers(ctx context.Context, c *config.Config) ([]nodeapi.PeerLinks, error) {
	if c.HTTP.Listen == config.Off {
		return nil, errors.New("http.listen is off: name that of the local sidecar with --http")
	}
	var links nodeapi.Links
	if err := ask.JSON(ctx, c.HTTP.Listen, "/v1/links", &links); err != nil {
		return nil, err
	}
	return links.Peers, nil
}

// WriteJSON writes the report as one object.
func (r *Report) WriteJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// WriteText writes the report for people.
func (r *Report) WriteText(w io.Writer) error {
	var b strings.Builder
	how := "without a key"
	if r.Secured {
		how = "mutual TLS"
	}
	fmt.Fprintf(&b, "%s is %s (kvspray %s, boot %s), %s\n", r.Endpoint, r.Node, r.Version, r.Boot, how)
	rtt := slices.Sorted(slices.Values(r.RTT))
	fmt.Fprintf(&b, "connected in %s; round trip %s, least %s, most %s of %d\n", span(r.Connect),
		span(rtt[len(rtt)/2]), span(rtt[0]), span(rtt[len(rtt)-1]), len(rtt))
	if r.MTU > 0 {
		fmt.Fprintf(&b, "path MTU %d\n", r.MTU)
	}
	if r.Local != "" {
		fmt.Fprintf(&b, "rails: %s\n", r.Local)
	}
	// Flush has the errors.
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, l := range r.Rails {
		rate := "not learned yet"
		if l.Samples > 0 {
			rate = fmt.Sprintf("%.2f Gb/s learned", l.Rate*8/1e9)
		}
		_, _ = fmt.Fprintf(t, "  %s:%s to %s\t%s\t%d lanes\tdelay %s\t%s\n", l.Transport, l.Local,
			l.Remote, l.State, l.Lanes, span(l.Delay), rate)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	// A peer chooses its name.
	text := strings.Map(func(c rune) rune {
		if c == '\n' || unicode.IsPrint(c) {
			return c
		}
		return '?'
	}, b.String())
	_, err := io.WriteString(w, text)
	return err
}

func span(seconds float64) string {
	return time.Duration(seconds * float64(time.Second)).Round(time.Microsecond).String()
}
