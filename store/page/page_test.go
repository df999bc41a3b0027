package page

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func sample() Namespace {
	return Namespace{Weights: "w", DType: "bfloat16", Layout: "l", PageTokens: 64, PageBytes: 4096,
		Algorithm: "vllm-sha256_cbor", Seed: "0"}
}

func TestCheckNamesTheField(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*Namespace)
		want   []string
	}{
		{"weights", func(n *Namespace) { n.Weights = "" }, []string{"weights", "digest"}},
		{"dtype", func(n *Namespace) { n.DType = "" }, []string{"dtype"}},
		{"layout", func(n *Namespace) { n.Layout = "" }, []string{"layout"}},
		{"long", func(n *Namespace) { n.Adapter = strings.Repeat("a", MaxFieldBytes+1) },
			[]string{"adapter", "257"}},
		{"tokens", func(n *Namespace) { n.PageTokens = 0 }, []string{"page_tokens", "65536"}},
		{"bytes", func(n *Namespace) { n.PageBytes = MaxBytes + 1 }, []string{"page_bytes",
			"67108865"}},
		{"secret", func(n *Namespace) { n.Secret = []byte("short") }, []string{"secret",
			"5 bytes", "16"}},
		{"seed", func(n *Namespace) { n.Seed = "" }, []string{"seed", "PYTHONHASHSEED"}},
		{"builtin", func(n *Namespace) { n.Algorithm = "vllm-builtin" }, []string{"vllm-builtin",
			"sha256_cbor"}},
		{"unknown", func(n *Namespace) { n.Algorithm = "md5" }, []string{`"md5"`, "sglang-sha256"}},
	} {
		n := sample()
		c.change(&n)
		err := n.Check()
		if err == nil {
			t.Errorf("%s: accepted", c.name)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q does not contain %q", c.name, err, w)
			}
		}
		if c.name == "secret" && strings.Contains(err.Error(), "short\"") {
			t.Errorf("the error shows the secret: %v", err)
		}
	}
	n := sample()
	if err := n.Check(); err != nil {
		t.Fatal(err)
	}
	n.Seed = ""
	if err := n.Check(); !errors.Is(err, ErrHashes) {
		t.Errorf("hashes that cannot agree: %v", err)
	}
}

// Every field changes the id, and moving a letter from one field to the next does, too.
func TestIDDependsOnEveryField(t *testing.T) {
	base := sample()
	seen := map[ID]string{base.ID(): "base"}
	v := reflect.TypeFor[Namespace]()
	for i := range v.NumField() {
		n := base
		f := reflect.ValueOf(&n).Elem().Field(i)
		switch f.Kind() {
		case reflect.String:
			f.SetString(f.String() + "x")
		case reflect.Int:
			f.SetInt(f.Int() + 1)
		case reflect.Slice:
			f.SetBytes(bytes.Repeat([]byte{1}, MinSecretBytes))
		default:
			t.Fatalf("field %s: kind %s", v.Field(i).Name, f.Kind())
		}
		if other, ok := seen[n.ID()]; ok {
			t.Errorf("%s: same id as %s", v.Field(i).Name, other)
		}
		seen[n.ID()] = v.Field(i).Name
	}
	a, b := base, base
	a.Weights, a.DType = "ab", "c"
	b.Weights, b.DType = "a", "bc"
	if a.ID() == b.ID() {
		t.Error("fields run into each other")
	}
}

// Without the secret, or with another one, neither the namespace's id nor a key can be computed.
func TestSecretHidesNames(t *testing.T) {
	plain, one, two := sample(), sample(), sample()
	one.Secret, two.Secret = bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)
	hash := bytes.Repeat([]byte{7}, 32)
	seen := map[Key]bool{}
	for _, n := range []Namespace{plain, one, two} {
		k, err := n.Keyer().Key(hash)
		if err != nil {
			t.Fatal(err)
		}
		if seen[k] {
			t.Error("one key under two secrets")
		}
		seen[k] = true
	}
}

func TestKeyRefusesHashes(t *testing.T) {
	n := sample()
	k := n.Keyer()
	for _, length := range []int{0, MinHashBytes - 1, MaxHashBytes + 1} {
		if _, err := k.Key(make([]byte, length)); err == nil || !strings.Contains(err.Error(),
			"page_hash") {
			t.Errorf("hash of %d bytes: %v", length, err)
		}
	}
	a, _ := k.Key(bytes.Repeat([]byte{1}, 32))
	b, _ := k.Key(bytes.Repeat([]byte{1}, 32))
	if a != b {
		t.Error("a Keyer has a memory")
	}
}

func TestBitmap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		bits := rapid.SliceOfN(rapid.Bool(), 0, 200).Draw(t, "bits")
		b := NewBitmap(len(bits))
		count, leading, ended := 0, 0, false
		for i, on := range bits {
			if on {
				b.Set(i)
				count++
			}
			ended = ended || !on
			if !ended {
				leading++
			}
		}
		for i, on := range bits {
			if b.Get(i) != on {
				t.Fatalf("bit %d", i)
			}
		}
		if b.Count() != count || b.Leading() != leading {
			t.Fatalf("count %d, leading %d of %v", b.Count(), b.Leading(), bits)
		}
	})
}

// The keys that other programs compute, too (pybind/tests/test_secret.py).
func TestGoldenKeys(t *testing.T) {
	text, err := os.ReadFile("../../testdata/page_keys.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []struct {
		Namespace struct {
			Weights, DType, Layout, Algorithm, Seed, Adapter, Secret string

			PageTokens int `json:"page_tokens"`
			PageBytes  int `json:"page_bytes"`
		}
		Hash, Space, Key string
	}
	if err := json.Unmarshal(text, &vectors); err != nil || len(vectors) < 3 {
		t.Fatalf("%d vectors, %v", len(vectors), err)
	}
	for _, v := range vectors {
		n := Namespace{Weights: v.Namespace.Weights, DType: v.Namespace.DType,
			Layout: v.Namespace.Layout, PageTokens: v.Namespace.PageTokens,
			PageBytes: v.Namespace.PageBytes, Algorithm: v.Namespace.Algorithm,
			Seed: v.Namespace.Seed, Adapter: v.Namespace.Adapter}
		if v.Namespace.Secret != "" {
			if n.Secret, err = hex.DecodeString(v.Namespace.Secret); err != nil {
				t.Fatal(err)
			}
		}
		if err := n.Check(); err != nil {
			t.Error(err)
		}
		hash, err := hex.DecodeString(v.Hash)
		if err != nil {
			t.Fatal(err)
		}
		key, err := n.Keyer().Key(hash)
		if err != nil || n.ID().String() != v.Space || key.String() != v.Key {
			t.Errorf("%s %s, want %s %s, %v", n.ID(), key, v.Space, v.Key, err)
		}
	}
}

// No way of printing a namespace shows its secret.
func TestSecretIsNotPrinted(t *testing.T) {
	n := sample()
	n.Secret = []byte("sixteen bytes...")
	for _, form := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x"} {
		for _, v := range []any{n, &n, struct{ N Namespace }{n}} {
			s := fmt.Sprintf(form, v)
			if strings.Contains(s, "sixteen") || strings.Contains(s, "115 105 120") ||
				strings.Contains(s, "7369787465656e") || strings.Contains(s, "0x73, 0x69") {
				t.Errorf("%s: %s", form, s)
			}
		}
	}
	if b, err := json.Marshal(n); err != nil || strings.Contains(string(b), "c2l4dGVlbiB") {
		t.Errorf("%s %v", b, err)
	}
}
