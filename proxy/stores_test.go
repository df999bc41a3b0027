package proxy

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/proxy/internal/place"
)

func TestConversation(t *testing.T) {
	const system, user = `{"role": "system", "content": "s"}`, `{"role":"user","content":"[{\"u\"}]"}`
	const answer = `{"content": "a", "role":"assistant"}`
	const tool = `{"role":"tool","content":["t"]}`
	for _, c := range []struct {
		text string
		end  int
		want place.Answers
	}{
		{``, 0, place.Answers{}},
		{`"a prompt"`, 0, place.Answers{}},
		{`[]`, 0, place.Answers{}},
		{`[` + user + `]`, 1 + len(user), place.Answers{}},
		{`[ ` + system + `, ` + user + ` , ` + answer + `,` + user + `]`,
			len(system+user+answer+user) + 8,
			place.Answers{Count: 1, From: len(system+user) + 4, To: len(system+user+answer) + 7,
				Bytes: len(answer)}},
		{`[` + user + `,` + answer + `,` + tool + `,` + answer + `]`,
			len(user+answer+tool+answer) + 4,
			place.Answers{Count: 2, From: len(user+answer+tool) + 3,
				To: len(user+answer+tool+answer) + 4, Bytes: 2 * len(answer)}},
		{`[` + user + `,`, 0, place.Answers{}},
		{`[` + user + `, {`, 0, place.Answers{}},
		{`[3, "x"]`, 7, place.Answers{}},
		{`[` + strings.Repeat(user+`,`, maxMessages) + user + `]`, 0, place.Answers{}},
	} {
		end, got := conversation([]byte(c.text))
		if end != c.end || got != c.want {
			t.Errorf("%.80s: %d, %+v, want %d, %+v", c.text, end, got, c.end, c.want)
		}
	}
}

// FuzzConversation: the parts of a prompt are in it, in their order.
func FuzzConversation(f *testing.F) {
	f.Add([]byte(`[{"role":"user"},{"role":"assistant","content":"x"},{"role":"user"}]`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		end, a := conversation(raw)
		if end < 0 || end > len(raw) || a.From < 0 || a.From > a.To || a.To > end ||
			a.Bytes > end || (a.Count == 0) != (a.To == 0) {
			t.Errorf("%q: %d, %+v", raw, end, a)
		}
	})
}

// sidecarWith answers as the sidecar of an engine that uses a store.
func sidecarWith(t *testing.T, endpoint string, store *nodeapi.Store) string {
	return newEngine(t, func(w http.ResponseWriter, r *http.Request, _ seen) {
		var answer any = nodeapi.Node{Endpoint: endpoint}
		switch {
		case r.URL.Path == "/v1/store" && store != nil:
			answer = store
		case r.URL.Path != "/v1/node":
			w.WriteHeader(http.StatusNotFound)
			return
		}
		_ = json.NewEncoder(w).Encode(answer)
	}).URL
}

// The second turn of a conversation is priced with the answer in the store, which the prefill
// engine then loads. If that takes longer than to compute, the engine is asked not to.
func TestTurnsWithAStore(t *testing.T) {
	answer := strings.Repeat("an answer ", 400)
	for _, slow := range []bool{false, true} {
		tier := nodeapi.StoreTier{Name: "memory"}
		if slow { // 2 MB take 1,000 s
			tier.Gets, tier.GetBytes, tier.GetSeconds = 1, 2<<20, 1000
		}
		store := &nodeapi.Store{Tiers: []nodeapi.StoreTier{tier}, Namespaces: []nodeapi.StoreNamespace{
			{PageTokens: 16, PageBytes: 16 << 17, Pools: 1}}}
		side := sidecarWith(t, "127.0.0.1:7650", store) // of both engines
		p, d := newEngine(t, answerPrefill), newEngine(t, answerDecode)
		log := &lines{}
		px, url := start(t, Config{Prefill: []Engine{{URL: p.URL, Sidecar: side}},
			Decode: []Engine{{URL: d.URL, Sidecar: side}}, Policy: "fetch", Mode: PrefillFirst,
			Log: slog.New(slog.NewTextHandler(log, nil))})
		until(t, "the policy has no store of both engines", func() bool {
			stores, engines := px.placing.Stores()
			return stores == 1 && engines == 2
		})
		first := fmt.Sprintf(`{"role": "user", "content": %q}`, strings.Repeat("a question ", 1000))
		for _, messages := range []string{first,
			first + fmt.Sprintf(`, {"role": "assistant", "content": %q}, {"role": "user", "content": "?"}`,
				answer)} {
			if code, text, _ := post(t, url, "/v1/chat/completions",
				`{"messages": [`+messages+`], "stream": true}`); code != 200 {
				t.Fatalf("%d %s", code, text)
			}
		}
		until(t, "no line of the second decision", func() bool {
			return strings.Count(log.String(), "msg=placed") == 2
		})
		_, line, _ := strings.Cut(log.String()[strings.LastIndex(log.String(), "msg=placed"):], " ")
		load, bounded := own(p.requests()[1])["load"]
		if slow != strings.Contains(line, "loaded=0 ") || slow != bounded {
			t.Errorf("slow %v: load %v, %s", slow, load, line)
		}
		if !slow && !strings.Contains(line, "tier=memory") {
			t.Error(line)
		}
		if own(p.requests()[0])["load"] != nil {
			t.Errorf("the first turn: %v", own(p.requests()[0]))
		}
	}
}
