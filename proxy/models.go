package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"
)

const (
	modelsEvery   = 10 * time.Second // engines load adapters while they run
	modelsAgain   = 5 * time.Second  // after a request without an answer
	modelsTimeout = time.Second
	maxModels     = 4 << 20 // bytes of an engine's list of models
)

// serves is whether an engine serves a model. The router prefers higher values.
type serves int8

const (
	servesNot   serves = iota - 1
	servesMaybe        // its models are unknown
	servesIt
)

// models are what an engine serves. The zero value is unknown.
type models struct {
	cards    map[string]json.RawMessage // by name; nil: unknown
	adapters map[string]bool            // of cards, those of a LoRA adapter
	due      time.Time                  // time of the next request for them
	unlisted bool                       // the log has a line about the missing list
}

// serve looks up a model; an empty name is the engine's default.
func (m *models) serve(model string) serves {
	switch {
	case m.cards == nil:
		return servesMaybe
	case model == "" || m.cards[model] != nil:
		return servesIt
	}
	return servesNot
}

// base reports whether the engine is known to serve a model, without an adapter: requests for one
// have other blocks with the same tokens.
func (m *models) base(model string) bool {
	return m.serve(model) == servesIt && !m.adapters[model]
}

// length is the largest number of tokens of prompt and answer of a model, or of the one that it
// adapts; 0: unknown.
func (m *models) length(model string) int {
	for range 2 {
		var card struct {
			Length int    `json:"max_model_len"`
			Parent string `json:"parent"`
		}
		if model == "" && len(m.cards) == 1 {
			for model = range m.cards {
			}
		}
		if json.Unmarshal(m.cards[model], &card) != nil {
			return 0
		}
		if card.Length > 0 {
			return card.Length
		}
		model = card.Parent
	}
	return 0
}

func (b *backend) modelLength(model string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.models.length(model)
}

// learnModels requests an engine's list of models when it is due.
func (p *Proxy) learnModels(ctx context.Context, b *backend) {
	b.mu.Lock()
	now := time.Now()
	due := !now.Before(b.models.due)
	if due {
		b.models.due = now.Add(modelsAgain)
		if b.waits {
			b.models.due = now // at the next check
		}
	}
	b.mu.Unlock()
	if !due {
		return
	}
	asking, cancel := context.WithTimeout(ctx, modelsTimeout)
	defer cancel()
	var list struct {
		Data []json.RawMessage `json:"data"`
	}
	err := p.get(asking, b.url, "/v1/models", &list, maxModels)
	m := models{cards: map[string]json.RawMessage{}, adapters: map[string]bool{}}
	for _, card := range list.Data {
		var x struct {
			ID     string `json:"id"`
			Parent string `json:"parent"`
		}
		if json.Unmarshal(card, &x) == nil && x.ID != "" {
			m.cards[x.ID] = card
			m.adapters[x.ID] = x.Parent != ""
		}
	}
	if err == nil && len(m.cards) == 0 {
		err = fmt.Errorf("GET %s/v1/models: no model in the answer", b.url)
	}
	b.mu.Lock()
	first := !b.models.unlisted
	switch {
	case err == nil:
		m.due = now.Add(modelsEvery)
		b.models = m
		p.found()
	case ctx.Err() == nil:
		b.models.unlisted = true
	}
	b.mu.Unlock()
	if b.found && err != nil && first && ctx.Err() == nil {
		p.log.Warn("an engine does not list its models, and gets no requests until it does", "url", b.url,
			"err", err)
		return
	}
	if err != nil && first && ctx.Err() == nil {
		p.log.Warn("an engine does not list its models: until it does, it gets requests for any model "+
			"that no other engine lists, and its hits are guesses", "url", b.url, "err", err)
	}
}

// forgetModels makes the next check request the list again: a new process may serve other models.
func (b *backend) forgetModels() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.models = models{unlisted: b.models.unlisted}
	b.waits = b.found
}

// models answers the models of all engines that can get a request. Without a list of any engine,
// for instance because they want a key, one of them answers.
func (p *Proxy) models(w http.ResponseWriter, r *http.Request) {
	all := map[string]json.RawMessage{}
	now := time.Now()
	for _, b := range p.decode.list() {
		if !b.candidate(now, "").possible() {
			continue
		}
		b.mu.Lock()
		for name, card := range b.models.cards {
			if all[name] == nil {
				all[name] = card
			}
		}
		b.mu.Unlock()
	}
	if len(all) == 0 {
		p.serve(w, r, kindPassed)
		return
	}
	cards := make([]json.RawMessage, 0, len(all))
	for _, name := range slices.Sorted(maps.Keys(all)) {
		cards = append(cards, all[name])
	}
	w.Header().Set("Content-Type", "application/json")
	// the client may be gone
	_ = json.NewEncoder(w).Encode(map[string]any{"object": "list", "data": cards})
}
