package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"
)

// Bounds of releases, for each prefill engine: one that is silent delays those of no other.
const (
	releaseTimeout = 5 * time.Second // of one, and of all that wait when the router ends
	releaseQueue   = 256             // that wait
	releaseWorkers = 4               // at once
	maxRelease     = 64 << 10        // bytes of one
)

// heldWithout is how long a prefill's sidecar keeps a cache without a release.
const heldWithout = "transfer.match_timeout, or transfer.hold_timeout while the decode engine lives"

// hold is a prompt's cache that a prefill engine keeps for a decode engine.
type hold struct {
	pre *backend
	own kvsprayParams
}

// hold notes what P keeps. Other connectors than ours have no release: their cache ends by time.
func (j *job) hold(pre *backend, params json.RawMessage) {
	if own := ownParams(params); own.Xfer != "" && own.Peer != "" {
		j.held = append(j.held, hold{pre, own})
		pre.mu.Lock()
		pre.holds++
		pre.mu.Unlock()
	}
}

func (h hold) end() {
	h.pre.mu.Lock()
	h.pre.holds--
	h.pre.mu.Unlock()
}

// release is a request that ends what a prefill engine keeps.
type release struct {
	request string // the id of the client's
	header  http.Header
	body    []byte
}

// release ends what prefill engines keep for a decode engine that does not fetch it: P would keep
// it until a timeout. It waits for nothing: the client's answer ends with its handler.
func (j *job) release() {
	used := ""
	if j.status >= http.StatusOK && j.status < http.StatusMultipleChoices {
		used = ownParams(j.used).Xfer
	}
	for _, h := range j.held {
		defer h.end()
		if h.own.Xfer == used {
			continue
		}
		r := j.releaseOf(h)
		err := fmt.Errorf("it has %d bytes, and %d is the bound", len(r.body), maxRelease)
		if len(r.body) <= maxRelease {
			select {
			case h.pre.releases <- r:
				continue
			default:
				err = fmt.Errorf("%d others wait", releaseQueue)
			}
		}
		j.p.unreleased(h.pre, j.id, releaseDropped, err)
	}
}

// releaseOf asks for one token with parameters that release a transfer: P's engine passes them to
// its connector before it schedules the request.
func (j *job) releaseOf(h hold) release {
	own := h.own
	own.V, own.Release, own.Traceparent = paramsVersion, true, ""
	fields := map[string]json.RawMessage{"prompt": json.RawMessage("[0]"),
		"max_tokens": json.RawMessage("1"),
		paramsKey:    marshal(transferParams{DoRemotePrefill: true, KVSpray: own})}
	if model := j.req.fields["model"]; model != nil {
		fields["model"] = model
	}
	header := http.Header{"Content-Type": {"application/json"},
		requestIDHeader: {j.id + "-release"}}
	if v := j.in.Header.Get("Authorization"); v != "" {
		header.Set("Authorization", v)
	}
	return release{j.id, header, encode(fields)}
}

// sendReleases sends what waits for one prefill engine until ctx ends and, for releaseTimeout at
// most, what waits then.
func (p *Proxy) sendReleases(ctx context.Context, b *backend) {
	sending, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	var wg sync.WaitGroup
	for range releaseWorkers {
		wg.Go(func() {
			for {
				select {
				case r := <-b.releases:
					p.sendRelease(sending, b, r)
					continue
				case <-ctx.Done():
				}
				select {
				case r := <-b.releases:
					p.sendRelease(sending, b, r)
				default:
					return
				}
			}
		})
	}
	<-ctx.Done()
	defer time.AfterFunc(releaseTimeout, stop).Stop()
	wg.Wait()
}

func (p *Proxy) sendRelease(ctx context.Context, b *backend, r release) {
	ctx, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	_, err := p.ask(ctx, b.url, kindCompletion.path(), r.header, r.body, maxSmallAnswer)
	if err != nil {
		p.unreleased(b, r.request, releaseFailed, err)
		return
	}
	p.met.releases.WithLabelValues(releaseSent).Inc()
}

func (p *Proxy) unreleased(b *backend, request, outcome string, err error) {
	p.met.releases.WithLabelValues(outcome).Inc()
	p.unsent.Note(slog.LevelWarn, "the prefill engine's cache could not be released: it stays for "+
		heldWithout, "request", request, "url", b.url, "err", err)
}
