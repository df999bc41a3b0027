package kvevents

import (
	"bytes"
	"encoding/hex"
	"reflect"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

// Batches as vLLM encodes them: that of 0.32 with maps, the first form with arrays of five fields,
// and arrays of a later version.
const (
	current = "" +
		"93cb41d954fc40200000968ca474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392c4" +
		"200101010101010101010101010101010101010101010101010101010101010101c420020202020202020202" +
		"0202020202020202020202020202020202020202020202b1706172656e745f626c6f636b5f68617368c0a974" +
		"6f6b656e5f696473940102cd012cce00011170aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d6564" +
		"69756da3475055a96c6f72615f6e616d65c0aa65787472615f6b65797392c0c0a967726f75705f69647800b2" +
		"6b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6eaa73657373696f6e5f6964" +
		"a1738ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391c4200303030303030303" +
		"030303030303030303030303030303030303030303030303b1706172656e745f626c6f636b5f68617368c420" +
		"0202020202020202020202020202020202020202020202020202020202020202a9746f6b656e5f6964739205" +
		"06aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c0" +
		"aa65787472615f6b6579739191a473616c74a86c6f63616c697479a652454d4f5445a96f776e657273686970" +
		"a76b76737072617988a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfffffff" +
		"ffffffffffb1706172656e745f626c6f636b5f6861736807a9746f6b656e5f696473920506aa626c6f636b5f" +
		"73697a6502a76c6f72615f696401a66d656469756da3475055a96c6f72615f6e616d65a373716c84a4747970" +
		"65ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c4200202020202020202020202020202" +
		"020202020202020202020202020202020202a66d656469756da3475055a967726f75705f6964780084a47479" +
		"7065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c42002020202020202020202020202" +
		"02020202020202020202020202020202020202a66d656469756da3475055a967726f75705f6964780181a474" +
		"797065b0416c6c426c6f636b73436c656172656403"
	oldest = "" +
		"92cb3ff80000000000009496ab426c6f636b53746f7265649201fec0940102030402c092ac426c6f636b5265" +
		"6d6f766564910191b0416c6c426c6f636b73436c656172656492aa426c6f636b46726f7a6581a178920181a1" +
		"79c4017a"
	arrays = "" +
		"94cb3ff8000000000000919cab426c6f636b53746f72656491c4200101010101010101010101010101010101" +
		"010101010101010101010101010101c420090909090909090909090909090909090909090909090909090909" +
		"090909090992010202c0a3475055c091c000ae736c6964696e675f77696e646f77cc80c0a56c61746572"
)

func unhex(t testing.TB, s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func decode(t *testing.T, b []byte) *Batch {
	t.Helper()
	got, err := Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func check(t *testing.T, got, want any) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func hashOf(fill byte) Name { return nameOf(bytes.Repeat([]byte{fill}, 32)) }

func TestCurrentForm(t *testing.T) {
	one, two, three := hashOf(1), hashOf(2), hashOf(3)
	check(t, decode(t, unhex(t, current)), &Batch{Rank: 3, Events: []Event{
		{Kind: Stored, Blocks: []Name{one, two}, Tokens: []uint32{1, 2, 300, 70000}, BlockSize: 2,
			Plain: 2, Tier: GPU},
		{Kind: Stored, Blocks: []Name{three}, Parent: two, HasParent: true, Tokens: []uint32{5, 6},
			BlockSize: 2, Tier: Host, Remote: true},
		{Kind: Stored, Blocks: []Name{nameOfInt(1<<64 - 1)}, Parent: nameOfInt(7), HasParent: true,
			Tokens: []uint32{5, 6}, BlockSize: 2, Plain: 1, Adapter: true, Tier: GPU},
		{Kind: Removed, Blocks: []Name{two}, Tier: GPU},
		{Kind: Removed, Blocks: []Name{two}, Tier: GPU, Partial: true},
		{Kind: Cleared, Tier: GPU},
	}})
}

func TestFormerForms(t *testing.T) {
	one := nameOfInt(1)
	minus := int64(-2)
	check(t, decode(t, unhex(t, oldest)), &Batch{Unknown: 1, Events: []Event{
		{Kind: Stored, Blocks: []Name{one, nameOfInt(uint64(minus))}, Tokens: []uint32{1, 2, 3, 4},
			BlockSize: 2, Plain: 2, Tier: GPU},
		{Kind: Removed, Blocks: []Name{one}, Tier: GPU},
		{Kind: Cleared, Tier: GPU},
	}})
	check(t, decode(t, unhex(t, arrays)), &Batch{Events: []Event{
		{Kind: Stored, Blocks: []Name{hashOf(1)}, Parent: hashOf(9), HasParent: true,
			Tokens: []uint32{1, 2}, BlockSize: 2, Plain: 1, Tier: GPU, Partial: true}}})
}

// Some versions have batches as maps.
func TestBatchAsMap(t *testing.T) {
	check(t, decode(t, encode(t, map[string]any{"ts": 1.5, "data_parallel_rank": 2, "new": []int{1},
		"events": []any{map[string]any{"type": "AllBlocksCleared"}}})),
		&Batch{Rank: 2, Events: []Event{{Kind: Cleared, Tier: GPU}}})
}

func encode(t testing.TB, v any) []byte {
	b, err := msgpack.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Events whose tokens are not those of their blocks are unknown; a batch goes on after them.
func TestEventsThatCannotBeUsed(t *testing.T) {
	got := decode(t, encode(t, []any{0.5, []any{
		[]any{"BlockStored", []int{1, 2}, nil, []int{1, 2, 3}, 2, nil},
		[]any{"BlockStored", []int{1}, nil, []int{}, 0, nil},
		map[string]any{"type": strings.Repeat("x", 1000)},
		[]any{},
		map[string]any{"block_hashes": []int{1}, strings.Repeat("k", 500): 1},
		map[string]any{"type": "AllBlocksCleared", "new": map[int]any{1: []any{nil, 1.5, true}}},
	}}))
	check(t, got, &Batch{Unknown: 5, Events: []Event{{Kind: Cleared, Tier: GPU}}})
}

func TestGarbage(t *testing.T) {
	deep := bytes.Repeat([]byte{0x91}, 1<<20)
	for what, b := range map[string][]byte{
		"empty":           {},
		"text":            []byte("hello"),
		"one field":       {0x91, 0xc0},
		"a long array":    {0x92, 0xc0, 0xdd, 0xff, 0xff, 0xff, 0xff},
		"a long map":      {0x92, 0xc0, 0x91, 0xdf, 0xff, 0xff, 0xff, 0xff},
		"a long hash":     {0x92, 0xc0, 0x91, 0x92, 0xac, 'B'},
		"deep":            append([]byte{0x92}, deep...),
		"float tokens":    encode(t, []any{0, []any{[]any{"BlockStored", []int{1}, nil, []any{1.5}, 1}}}),
		"negative tokens": encode(t, []any{0, []any{[]any{"BlockStored", []int{1}, nil, []any{-5}, 1}}}),
		"hash of 65":      encode(t, []any{0, []any{[]any{"BlockRemoved", []any{make([]byte, 65)}}}}),
		"block size": encode(t, []any{0, []any{[]any{"BlockStored", []any{}, nil, []any{},
			1 << 40}}}),
		"a map without events": encode(t, map[string]any{"ts": 1}),
	} {
		if got, err := Decode(b); err == nil {
			t.Errorf("%s: %+v", what, got)
		}
	}
	if _, err := Decode(make([]byte, MaxBytes+1)); err == nil {
		t.Error("a batch that is too long")
	}
	// A length of bytes must not be allocated before they are there.
	big := []byte{0x92, 0xc0, 0x91, 0x92, 0xac, 0xc6, 0xff, 0xff, 0xff, 0xff}
	if n := testing.AllocsPerRun(10, func() { _, _ = Decode(big) }); n > 50 {
		t.Errorf("%v allocations", n)
	}
}

// The bounds are those of a batch: many events share them.
func TestBatchHasOneBudget(t *testing.T) {
	event := func(blocks, tokens int) any {
		return []any{"BlockStored", make([]int, blocks), nil, make([]int, tokens), 1}
	}
	for what, events := range map[string][]any{
		"blocks": {event(MaxBlocks/2, 0), event(MaxBlocks/2, 0), event(1, 0)},
		"tokens": {event(0, MaxTokens/2), event(0, MaxTokens/2), event(0, 1)},
	} {
		if got, err := Decode(encode(t, []any{0, events})); err == nil {
			t.Errorf("%s: %d events", what, len(got.Events))
		}
		if _, err := Decode(encode(t, []any{0, events[:2]})); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// FuzzDecode: no panic, and no more memory than the bytes have room for.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{current, oldest, arrays} {
		f.Add(unhex(f, s))
	}
	f.Add(encode(f, map[string]any{"ts": 1.5, "data_parallel_rank": nil,
		"events": []any{[]any{"BlockRemoved", []int{1, 2}, "CPU"}}}))
	f.Add([]byte{0x92, 0xc0, 0xdd, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := Decode(b)
		if err != nil {
			return
		}
		n := got.Unknown
		for _, e := range got.Events {
			n += 1 + len(e.Blocks) + len(e.Tokens)
			if e.Kind == Stored && (len(e.Tokens) != len(e.Blocks)*e.BlockSize || e.Plain < 0 ||
				e.Plain > len(e.Blocks)) {
				t.Fatalf("%+v", e)
			}
		}
		if n > len(b) {
			t.Fatalf("%d items of %d bytes", n, len(b))
		}
	})
}

func BenchmarkDecode(b *testing.B) {
	tokens := make([]int, 32<<10)
	for i := range tokens {
		tokens[i] = i * 4
	}
	hashes := make([][]byte, len(tokens)/16)
	for i := range hashes {
		hashes[i] = bytes.Repeat([]byte{byte(i)}, 32)
	}
	payload := encode(b, []any{1.5, []any{[]any{"BlockStored", hashes, nil, tokens, 16, nil, "GPU"}}})
	b.SetBytes(int64(len(payload)))
	for b.Loop() {
		if _, err := Decode(payload); err != nil {
			b.Fatal(err)
		}
	}
}
