// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

const releaseTimeout = 5 * time.Second

// hold is a prompt's cache that a prefill engine keeps for a decode engine.
type hold struct {
	pre *backend
	own kvsprayParams
}

// hold notes what P keeps. Other connectors than ours have no release: their cache ends by time.
func (j *job) hold(pre *backend, params json.RawMessage) {
	if own := ownParams(params); own.Xfer != "" && own.Peer != "" {
		j.held = append(j.held, hold{pre, own})
	}
}

// release ends what prefill engines keep for a decode engine that does not fetch it: P would wait
// for its match timeout. A D that got the request of a client that is gone ends it itself.
func (j *job) release(ctx context.Context) {
	if ctx.Err() != nil && len(j.tried) > 0 {
		return
	}
	used := ""
	if j.status >= http.StatusOK && j.status < http.StatusMultipleChoices {
		used = ownParams(j.used).Xfer
	}
	for _, h := range j.held {
		if h.own.Xfer == used {
			continue
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
		err := j.sendRelease(ctx, h)
		cancel()
		if err != nil {
			j.p.log.Warn("the prefill engine's cache could not be released: it stays for the match timeout",
				"request", j.id, "url", h.pre.url, "err", err)
		}
	}
}

// sendRelease asks P for one token with parameters that release a transfer: P's engine passes them
// to its connector before it schedules the request.
func (j *job) sendRelease(ctx context.Context, h hold) error {
	own := h.own
	own.V, own.Release, own.Traceparent = paramsVersion, true, ""
	params, err := json.Marshal(transferParams{DoRemotePrefill: true, KVSpray: own})
	if err != nil {
		return err
	}
	body, err := json.Marshal(map[string]json.RawMessage{"model": j.req.fields["model"],
		"prompt": json.RawMessage("[0]"), "max_tokens": json.RawMessage("1"), paramsKey: params})
	if err != nil {
		return err
	}
	req, err := h.pre.url.Request(ctx, http.MethodPost, kindCompletion.path(), bytes.NewReader(body))
	if err != nil {
		return err
	}
	header := http.Header{"Content-Type": {"application/json"}}
	if v := j.in.Header.Get("Authorization"); v != "" {
		header.Set("Authorization", v)
	}
	header.Set(requestIDHeader, j.id+"-release")
	h.pre.url.SetHeader(req, header)
	resp, err := j.p.client.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }() // read to its end or aborted
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxSmallAnswer))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("release: %w", newStatusError(resp, text))
	}
	return err
}
