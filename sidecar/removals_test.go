package sidecar

import (
	"bytes"
	"encoding/json"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/nodeapi"
)

// remove removes the only namespace as an operator does.
func (n *storeNode) remove(t *testing.T, id, more string) (code int, out nodeapi.StoreRemoved,
	text string) {
	t.Helper()
	code, text = ask(t, n.running, http.MethodPost, "/v1/store/remove?namespace="+id+more)
	_ = json.Unmarshal([]byte(text), &out)
	return code, out, text
}

// awaitMembers waits until a node has a number of other members with a store.
func (n *storeNode) awaitMembers(t *testing.T, others int) {
	t.Helper()
	until(t, func() bool {
		count := 0
		for _, m := range n.pages.storeMembers() {
			if m.Boot != n.boot {
				count++
			}
		}
		return count == others
	})
}

// tries is fetch of a node that may refuse, because it lacks the removals of its peers.
func (n *storeNode) tries(t *testing.T, pages ...byte) []byte {
	t.Helper()
	lease, err := n.Get(msg.Get{Space: n.pageEngine.space, Hashes: hashes16(pages...), HashBytes: 16,
		Blocks: []uint32{100, 101, 102}[:len(pages)]})
	if err != nil {
		t.Fatal(err)
	}
	return n.wait(lease).Received.Pages
}

// TestNamespaceIsRemovedOnAllNodes: by an engine, and by an operator. Pages put afterwards stay.
func TestNamespaceIsRemovedOnAllNodes(t *testing.T) {
	all := newStoreCluster(t, nil).nodes(3)
	for _, n := range all {
		n.awaitMembers(t, 2)
		n.put(t, 1, 2, 3)
	}
	a, b := all[0], all[1]
	if err := a.Remove(t.Context(), a.pageEngine.space); err != nil {
		t.Fatal(err)
	}
	for i, n := range all { // all have confirmed
		if got := hits(n.fetch(t, 1, 2, 3)); got != 0 {
			t.Errorf("node %d has %d pages", i, got)
		}
	}
	b.put(t, 1)
	a.exists(t, 1)
	if got := a.fetch(t, 1, 2); !bytes.Equal(got, []byte{fromPeer, msg.PageMiss}) {
		t.Errorf("%v", got)
	}
	id := a.state(t).Namespaces[0].ID
	code, out, text := b.remove(t, id, "")
	if code != http.StatusOK || out.Confirmed != 3 || len(out.Members) != 3 || out.Namespace != id {
		t.Fatalf("%d %s", code, text)
	}
	for i, n := range all {
		if got := hits(n.fetch(t, 1, 2, 3)); got != 0 {
			t.Errorf("node %d has %d pages", i, got)
		}
	}
	if st := a.state(t); st.Removals.Known != 1 || st.Removals.Pending != 0 {
		t.Errorf("%+v", st.Removals)
	}
	for more, want := range map[string]string{"00": "64 hexadecimal digits",
		"&unknown=perhaps": "true or false"} {
		if code, _, text := b.remove(t, id, more); code != http.StatusBadRequest ||
			!strings.Contains(text, want) {
			t.Errorf("%s: %d %s", more, code, text)
		}
	}
	if code, _, text := b.remove(t, strings.Repeat("0", 64), ""); code != http.StatusConflict ||
		!strings.Contains(text, "is not open on this node") {
		t.Errorf("%d %s", code, text)
	}
}

// TestRemovalWhileANodeIsAway: a node with a disk is away, and serves nothing from before the
// removal when it comes back.
func TestRemovalWhileANodeIsAway(t *testing.T) {
	c := newStoreCluster(t, nil)
	c.waits = true
	a := c.add(true)
	path := filepath.Join(t.TempDir(), "pages")
	withDisk := func(cfg *config.Config) {
		cfg.Store.Disk = []config.StoreDisk{{Path: path, Size: 64 << 20}}
	}
	c.change = withDisk
	b := c.add(false)
	a.meets(t, 1)
	b.meets(t, 1)
	b.put(t, 1, 2, 3)
	if err := b.stop(); err != nil {
		t.Fatal(err)
	}
	if err := a.Remove(t.Context(), a.pageEngine.space); err != nil {
		t.Fatal(err)
	}
	b = c.add(false)
	if got := hits(b.tries(t, 1, 2, 3)); got != 0 {
		t.Errorf("%d pages before it has met a peer", got)
	}
	b.meets(t, 1)
	until(t, func() bool { r := b.state(t).Removals; return r.Known == 1 && r.Pending == 0 })
	if got := hits(b.fetch(t, 1, 2, 3)); got != 0 {
		t.Errorf("%d pages are back", got)
	}
	b.put(t, 2) // stays, over another restart
	if err := b.stop(); err != nil {
		t.Fatal(err)
	}
	b = c.add(false)
	b.meets(t, 1)
	b.exists(t, 2)
	if got := b.fetch(t, 1, 2); got[0] != msg.PageMiss || got[1]&15 != msg.PageHit {
		t.Errorf("%v", got)
	}
}
