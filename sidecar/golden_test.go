package sidecar

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/parseblock"
)

// The golden registrations, by which others write their own shims, are such as a sidecar takes.
func TestGoldenLayouts(t *testing.T) {
	raw, err := os.ReadFile("../testdata/golden/socket.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct{ Name, Hex string }
	if err := json.Unmarshal(raw, &vectors); err != nil {
		t.Fatal(err)
	}
	reg, tried := parseblock.Default(), 0
	for _, v := range vectors {
		if !strings.HasPrefix(v.Name, "register") {
			continue
		}
		b, err := hex.DecodeString(v.Hex)
		if err != nil {
			t.Fatal(err)
		}
		m, err := msg.DecodePacket(b)
		if err != nil {
			t.Fatalf("%s: %v", v.Name, err)
		}
		r, ok := m.(*msg.Register)
		if !ok {
			continue
		}
		l, err := layout.Unmarshal(r.Layout)
		if err == nil {
			err = layout.ValidateForeign(l, reg.Planes)
		}
		if err != nil {
			t.Errorf("%s: %v", v.Name, err)
		}
		tried++
	}
	if tried < 3 {
		t.Errorf("%d registrations in the golden vectors", tried)
	}
}
