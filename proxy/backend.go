// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"
)

const (
	rolePrefill = "prefill"
	roleDecode  = "decode"
)

// backend is one engine with its health.
type backend struct {
	role       string
	number     int // in its pool
	url        string
	sidecar    string   // address for asking for its state; empty: none
	configured bool     // the operator set peer
	twin       *backend // the same engine in the other role; nil: none

	mu       sync.Mutex // guards all below
	peer     string
	heard    string    // last endpoint of its sidecar according to its engine
	said     string    // last endpoint, of engine or sidecar, that peer was compared with
	compared string    // the same of the endpoint from sidecar
	warning  string    // why that endpoint contradicts peer
	unasked  string    // why sidecar cannot be asked
	told     string    // endpoint from the last answer of sidecar; empty: it did not answer
	leaving  bool      // by its sidecar, the engine ends soon
	answered time.Time // when sidecar did so last
	silent   bool      // it did not answer since
	load     int       // requests in flight
	failures int       // failed health checks in a row
	known    bool      // the first check was made
	reason   string
}

func (b *backend) upLocked() bool { return b.failures < downAfter && (b.known || b.failures == 0) }

// takesLocked reports whether it gets new requests.
func (b *backend) takesLocked() bool { return b.upLocked() && !b.leaving }

// warningsLocked returns warnings for the operator; empty: none.
func (b *backend) warningsLocked() string {
	if b.unasked != "" && b.warning != "" {
		return b.unasked + "; " + b.warning
	}
	return b.unasked + b.warning
}

func (b *backend) peerAddr() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.peer
}

// note records the outcome of a health check and reports whether the state changed.
func (b *backend) note(err error) (up, changed bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	before := b.upLocked()
	first := !b.known
	b.known = true
	if err == nil {
		b.failures, b.reason = 0, ""
	} else {
		b.failures, b.reason = min(b.failures+1, downAfter), err.Error()
		if first {
			b.failures = downAfter // no good check is known
		}
	}
	up = b.upLocked()
	if !up && b.silent {
		b.leaving = false // it has ended; what comes back may have another sidecar, or none
	}
	return up, up != before || first
}

// suspect takes a back end out at once after a failed connection. The next good health check
// restores it.
func (b *backend) suspect(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.known, b.failures, b.reason = true, downAfter, err.Error()
}

// pool holds all back ends of one role.
type pool struct {
	all []*backend

	mu   sync.Mutex
	next int // start of the search, so that equal back ends alternate
}

func newPool(all []*backend) *pool { return &pool{all: all} }

// take returns the least loaded back end that is up, does not leave, and is not in skip, and raises
// its load; nil if there is none. The caller releases it with done.
func (p *pool) take(skip map[*backend]bool) *backend {
	p.mu.Lock()
	defer p.mu.Unlock()
	var best *backend
	bestLoad := 0
	for i := range p.all {
		b := p.all[(p.next+i)%len(p.all)]
		if skip[b] {
			continue
		}
		b.mu.Lock()
		takes, load := b.takesLocked(), b.load
		b.mu.Unlock()
		if t := b.twin; t != nil {
			t.mu.Lock()
			load += t.load
			t.mu.Unlock()
		}
		if takes && (best == nil || load < bestLoad) {
			best, bestLoad = b, load
		}
	}
	if best == nil {
		return nil
	}
	p.next++
	best.mu.Lock()
	best.load++
	best.mu.Unlock()
	return best
}

func (b *backend) done() {
	b.mu.Lock()
	b.load--
	b.mu.Unlock()
}

func (b *backend) takes() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.takesLocked()
}

// none says why no back end takes requests.
func (p *pool) none(role string) string {
	leave := 0
	for _, b := range p.all {
		b.mu.Lock()
		if b.upLocked() && b.leaving {
			leave++
		}
		b.mu.Unlock()
	}
	if leave > 0 {
		return fmt.Sprintf("no %s engine takes requests (%d leave)", role, leave)
	}
	return fmt.Sprintf("no %s engine is up", role)
}

func (p *pool) anyTakes() bool { return slices.ContainsFunc(p.all, (*backend).takes) }

// anyTakesBut reports whether a back end takes requests that is not b.
func (p *pool) anyTakesBut(b *backend) bool {
	return slices.ContainsFunc(p.all, func(x *backend) bool { return x != b && x.takes() })
}

// takeThis raises the load of one back end if it takes requests; otherwise it returns nil.
func (p *pool) takeThis(b *backend) *backend {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.takesLocked() {
		return nil
	}
	b.load++
	return b
}

// watch checks one back end until ctx ends. The first outcome counts only after the first answer of
// its sidecar, or its timeout, so that a router that starts sends nothing to an engine that leaves.
func (p *Proxy) watch(ctx context.Context, b *backend, asked <-chan struct{}) {
	tick := time.NewTicker(healthEvery)
	defer tick.Stop()
	lost := false // its cache, since it was up: also if a failed request took it out before
	for {
		err := p.check(ctx, b)
		select {
		case <-ctx.Done():
		case <-asked:
		}
		if ctx.Err() != nil {
			return
		}
		up, changed := b.note(err)
		p.met.up.WithLabelValues(b.role, b.url).Set(map[bool]float64{true: 1}[up])
		if changed {
			if up {
				p.log.Info("back end is up", "role", b.role, "url", b.url, "peer", b.peerAddr())
			} else {
				p.log.Warn("back end is down", "role", b.role, "url", b.url, "err", err)
			}
		}
		if !up && !lost {
			p.lost(b)
		}
		lost = !up
		if err == nil {
			p.learnModels(ctx, b) // last: a slow answer holds up nothing but the next check
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// watchSidecar asks the sidecar of one back end until ctx ends, also while the engine is down.
// Neither waits for the other. It closes asked after the first time.
func (p *Proxy) watchSidecar(ctx context.Context, b *backend, asked chan<- struct{}) {
	tick := time.NewTicker(healthEvery)
	defer tick.Stop()
	p.askSidecar(ctx, b)
	close(asked)
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		p.askSidecar(ctx, b)
	}
}

func (p *Proxy) askSidecar(ctx context.Context, b *backend) {
	asking, cancel := context.WithTimeout(ctx, sidecarTimeout)
	defer cancel()
	n, err := p.node(asking, b)
	if ctx.Err() != nil {
		return // the router ends
	}
	p.asked(b, n.Endpoint, err)
}

func (p *Proxy) check(ctx context.Context, b *backend) error {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	if err := p.get(ctx, b.url+"/health", nil); err != nil {
		return err
	}
	b.mu.Lock()
	said, asked := b.told, b.told
	// the engine is more reliable than a sidecar that may be another engine's
	if b.heard != "" || !b.configured {
		said = b.heard
	}
	b.mu.Unlock()
	p.compare(ctx, b, said, asked)
	p.learn(ctx, b) // last: a slow answer must not cost the endpoint
	return nil
}

// node is what a sidecar answers about itself.
type node struct {
	Endpoint string `json:"endpoint"`
	Leaving  bool   `json:"leaving"`
}

// node asks the sidecar of a back end. While it does not answer, its last word on whether the
// engine leaves stays for leavingFor: a slow answer must not bring requests to an engine that ends.
func (p *Proxy) node(ctx context.Context, b *backend) (node, error) {
	var n node
	err := p.get(ctx, b.sidecar+"/v1/node", &n)
	b.mu.Lock()
	leaves, was := n.Leaving, b.leaving
	if b.silent = err != nil; b.silent {
		leaves = was && time.Since(b.answered) < leavingFor
	} else {
		b.answered = time.Now()
	}
	b.leaving = leaves
	up := b.upLocked()
	b.mu.Unlock()
	switch {
	case !up || leaves == was:
	case leaves:
		p.log.Info("back end leaves", "role", b.role, "url", b.url)
	default:
		p.log.Info("back end takes requests again", "role", b.role, "url", b.url)
	}
	if err != nil {
		return node{}, err
	}
	if n.Endpoint == "" {
		return n, errors.New("its answer contains no endpoint")
	}
	return n, nil
}

// asked uses the endpoint from the sidecar of a prefill, unless the operator has set one, and of a
// decode if a policy needs it. A sidecar that does not answer does not take the engine out:
// requests then go prefill first, and the engine itself names the endpoint. No answer is expected
// while the engine is not up.
func (p *Proxy) asked(b *backend, endpoint string, err error) {
	flag := "--" + b.role + "-sidecar"
	b.mu.Lock()
	defer b.mu.Unlock()
	unasked := ""
	if err != nil {
		endpoint = ""
		if b.known && b.upLocked() {
			unasked = fmt.Sprintf("%s %s cannot be asked (%v): %s; pass the http.listen of "+
				"this engine's sidecar", flag, b.sidecar, err, b.costs())
		}
	}
	switch was := b.unasked; {
	case unasked != "" && was == "":
		p.log.Warn("the sidecar of an engine cannot be asked", "role", b.role, "url", b.url,
			b.role+"_sidecar", b.sidecar, "err", err,
			"remedy", "pass the http.listen of this engine's running sidecar as "+flag)
	case err == nil && was != "":
		p.log.Info("the sidecar of an engine answers", "role", b.role, "url", b.url, b.role+"_sidecar",
			b.sidecar)
	}
	b.unasked = unasked
	if b.role == roleDecode {
		if err == nil && p.placing != nil {
			b.peer = endpoint
		}
		return
	}
	b.told = endpoint
	if !b.configured && endpoint != b.peer {
		if endpoint != "" {
			p.log.Info("endpoint of the prefill's sidecar", "url", b.url, "peer", endpoint)
		}
		b.peer, b.said, b.warning = endpoint, "", ""
	}
}

// costs says what a sidecar costs that cannot be asked.
func (b *backend) costs() string {
	switch {
	case b.role == roleDecode:
		return "until it answers, nothing shows that the engine leaves"
	case b.configured:
		return "nothing checks --prefill-peer, or shows that the engine leaves"
	}
	return "until it answers, decode engines start only after the prefill"
}

// hear records an engine's endpoint of its sidecar. The next check compares it: a comparison looks
// up names, for which no request waits.
func (b *backend) hear(peer string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.heard = peer
}

// compare checks whether the endpoint that D receives (set by the operator, or from the sidecar
// that the operator named) is the endpoint of the prefill's side. It may be another name of the
// same. A wrong endpoint costs each request its transfer, without another sign of the cause. asked
// is the endpoint from the named sidecar; said is that, or the engine's.
func (p *Proxy) compare(ctx context.Context, b *backend, said, asked string) {
	b.mu.Lock()
	peer, known := b.peer, said == b.said && (asked == "" || asked == b.compared)
	b.mu.Unlock()
	if peer == "" || said == "" || known {
		return
	}
	same := sameEndpoint(ctx, peer, said)
	checked := same && (asked == "" || sameEndpoint(ctx, asked, said))
	if ctx.Err() != nil {
		return // the next check tries again
	}
	warning := ""
	if !checked {
		flag, value, named, remedy := "--prefill-peer", peer, peer, "--prefill-peer "+said
		switch {
		case same || !b.configured:
			flag, value, remedy = "--prefill-sidecar", b.sidecar,
				"--prefill-sidecar the http.listen of that one"
			named = b.sidecar + ", whose endpoint is " + asked
		case asked == said:
			remedy += ", or correct --prefill-sidecar " + b.sidecar + ", which returned it"
		}
		warning = fmt.Sprintf("%s is %s, but the endpoint of this engine's sidecar is %s: pass %s, "+
			"unless both are the same", flag, named, said, remedy)
		p.log.Warn("the prefill's sidecar may be another one", "url", b.url, "flag", flag, "value", value,
			"peer", peer, "sidecar", said, "remedy", remedy)
	}
	b.mu.Lock()
	b.said, b.compared, b.warning = said, asked, warning
	b.mu.Unlock()
}

// sameEndpoint reports whether two host:port have the same port and a common address. If a name
// cannot be resolved here, engines may still resolve it: the result is then true.
func sameEndpoint(ctx context.Context, x, y string) bool {
	if x == y {
		return true
	}
	xh, xp, xerr := net.SplitHostPort(x)
	yh, yp, yerr := net.SplitHostPort(y)
	if xerr != nil || yerr != nil || xp != yp {
		return false
	}
	xa, xerr := net.DefaultResolver.LookupHost(ctx, xh)
	ya, yerr := net.DefaultResolver.LookupHost(ctx, yh)
	if xerr != nil || yerr != nil {
		return true
	}
	return slices.ContainsFunc(xa, func(a string) bool { return slices.Contains(ya, a) })
}

const maxSmallAnswer = 64 << 10 // bytes of a health or node answer

func (p *Proxy) get(ctx context.Context, url string, into any) error {
	return p.getMost(ctx, url, into, maxSmallAnswer)
}

// getMost reads an answer of at most some bytes.
func (p *Proxy) getMost(ctx context.Context, url string, into any, most int64) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }() // read to its end or aborted
	body, err := io.ReadAll(io.LimitReader(resp.Body, most))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", url, resp.Status)
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(body, into)
}
