package sidecar

import (
	"slices"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/store/page"
)

// However many namespaces there are, few have a label, and those keep it.
func TestLabelsAreBounded(t *testing.T) {
	var x tenants
	shares := func(id page.ID) (s store.Shares) {
		if id[0] == 0 {
			s[store.Memory].Quota = 7
		}
		return s
	}
	usage := func(ids ...int) (out []store.Usage) {
		for _, i := range ids {
			out = append(out, store.Usage{ID: page.ID{byte(i >> 8), byte(i)},
				Bytes: [store.Object + 1]uint64{store.Memory: 1, store.Disk: 2}, Hits: 3})
		}
		return out
	}
	all := func(from, to int) (out []int) {
		for i := from; i < to; i++ {
			out = append(out, i)
		}
		return out
	}
	first := x.sample(usage(all(500, 500+metrics.MaxNamespaces)...), shares)
	if len(first) != metrics.MaxNamespaces || first["01f400000000"].Results["hit"] != 3 {
		t.Fatalf("%v", first)
	}
	got := x.sample(usage(all(0, 1000)...), shares)
	if len(got) != metrics.MaxNamespaces+1 || got[otherLabel].Bytes["disk"] != 2*(1000-64) ||
		len(got[otherLabel].Results) != 0 {
		t.Fatalf("%d labels, %v", len(got), got[otherLabel])
	}
	for label := range first {
		if _, kept := got[label]; !kept {
			t.Errorf("%s has lost its label to one that came later", label)
		}
	}
	got = x.sample(usage(0), shares)
	if n := got["000000000000"]; len(got) != 1 || n.Quota["memory"] != 7 || len(n.Quota) != 1 ||
		!slices.Equal([]float64{n.Bytes["memory"], n.Bytes["disk"], n.Bytes["object"]},
			[]float64{1, 2, 0}) {
		t.Errorf("%v", got)
	}
}

// Engines with different secrets do not find each other's pages, and a secret is shown nowhere.
func TestTenantsAreApart(t *testing.T) {
	r := start(t, func(c *config.Config) { c.Store.Memory = 8 << 20 })
	open := func(secret string) (*pageEngine, uint64) {
		e := newPageEngine(t, r)
		p := openPool()
		p.Namespace.Secret = []byte(secret)
		space, err := e.OpenSpace(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		return e, space
	}
	fetch := func(e *pageEngine, space uint64) byte {
		lease, err := e.Get(msg.Get{Space: space, Hashes: hashes16(1), HashBytes: 16,
			Blocks: []uint32{3}})
		if err != nil {
			t.Fatal(err)
		}
		return e.ok(lease).Received.Pages[0]
	}
	secrets := []string{"", "first tenant's secret", "second tenant's secret"}
	first, mine := open(secrets[1])
	lease, err := first.Put(msg.Put{Space: mine, Hashes: hashes16(1), HashBytes: 16,
		Blocks: []uint32{0}})
	if err != nil {
		t.Fatal(err)
	}
	first.ok(lease)
	if got := fetch(first, mine); got != fromMemory {
		t.Errorf("its own page: %d", got)
	}
	second, other := open(secrets[2])
	for name, got := range map[string]byte{"another secret": fetch(second, other),
		"no secret": fetch(first, first.space)} {
		if got != msg.PageMiss {
			t.Errorf("%s: %d", name, got)
		}
	}
	if err := second.Remove(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	if got := fetch(first, mine); got != fromMemory {
		t.Errorf("after another tenant has removed its pages: %d", got)
	}
	for _, path := range []string{"/v1/store", "/metrics", "/debug/state"} {
		_, text := get(t, r, path)
		if strings.Contains(text, "tenant's secret") {
			t.Errorf("%s shows a secret", path)
		}
	}
}
