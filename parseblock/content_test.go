package parseblock

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/layout"
	"github.com/kvspray/kvspray/layout/digest"
)

// faultsOfCase is the number of faults that TestContentLaws injects into each case.
const faultsOfCase = 10

// TestContentLaws: the sources' digests add up to the receiver's and to that of the reference, in
// every order, block size, parallelism and kind of cache. A fault changes the receiver's digest if
// it changes a byte of the content, and only then.
func TestContentLaws(t *testing.T) {
	reg := Default()
	injected, changed := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		p := drawPrompt(t, reg, &families[rapid.IntRange(0, len(families)-1).Draw(t, "family")])
		c := newContents(t, reg, p, rapid.Uint64().Draw(t, "seed"))
		if want := c.reference(t, p.to); c.sent != want {
			t.Fatalf("the sources have the digest %#x, the reference %#x", c.sent, want)
		}
		whole := random(p.to.size, 1)
		c.fill(p.to, 0, p.tt, p.first, whole)
		if got := c.received(t, whole); got != c.sent {
			t.Fatalf("the receiver has the digest %#x, the sources %#x", got, c.sent)
		}
		for range faultsOfCase {
			f := &faults[c.rng.IntN(len(faults))]
			mem := f.inject(c, whole)
			differs := c.differs(mem, whole)
			if got := c.received(t, mem); (got != c.sent) != differs {
				t.Fatalf("%s: digest %#x, sent %#x, content changed %v", f.name, got, c.sent, differs)
			}
			if injected++; differs {
				changed++
			}
		}
	})
	t.Logf("%d faults, of which %d changed the content: each of these was noticed", injected, changed)
}

// contents is a prompt with content, and the digest that its sources send.
type contents struct {
	*prompt
	reg      *Registry
	rng      *rand.Rand
	key      *digest.Key
	model    modelByte
	mems     [][]byte // of the sources
	contents []*Content
	sent     uint64
}

func newContents(t *rapid.T, reg *Registry, p *prompt, seed uint64) *contents {
	c := &contents{prompt: p, reg: reg, rng: rand.New(rand.NewPCG(seed, 1)),
		key: digest.NewKey([digest.SeedBytes]byte(random(digest.SeedBytes, seed)))}
	c.model = func(layer int, role layout.Role, head, e, col, x uint64) byte {
		n := seed
		for _, v := range [...]uint64{uint64(layer), uint64(role), head, e, col, x} {
			n = (n ^ v) * 0x9e3779b97f4a7c15
			n ^= n >> 29
		}
		return byte(n)
	}
	c.mems = make([][]byte, len(p.sources))
	for i, s := range p.sources {
		c.mems[i] = random(s.size, uint64(i)+seed)
		c.fill(s, p.at[i], p.ft, p.kept, c.mems[i])
	}
	for i := range p.shares {
		from := p.layouts[p.shares[i].Source]
		content, err := NewContent(reg, from, p.dst, &p.shares[i], uint32(p.tokens),
			repeat(uint32(p.skip), len(p.to.groups)))
		if err != nil {
			t.Fatal(err)
		}
		c.contents = append(c.contents, content)
		n, err := content.Digest(reg, c.key, from, [][]byte{c.mems[p.shares[i].Source]},
			repeat(p.ft, len(from.Groups)))
		if err != nil {
			t.Fatal(err)
		}
		c.sent = digest.Add(c.sent, n)
	}
	return c
}

func (c *contents) fill(to *cache, firstLayer int, table []uint32, first uint64, mem []byte) {
	fill(to, firstLayer, table, first, c.tokens, mem, c.model)
}

// received is the digest of the receiver's memory.
func (c *contents) received(t *rapid.T, mem []byte) (all uint64) {
	for _, content := range c.contents {
		n, err := content.Digest(c.reg, c.key, c.dst, [][]byte{mem}, repeat(c.tt, len(c.to.groups)))
		if err != nil {
			t.Fatal(err)
		}
		all = digest.Add(all, n)
	}
	return all
}

// reference is the digest of the model's content: each unit in memory of its own, one after
// another.
func (c *contents) reference(t *rapid.T, to *cache) (all uint64) {
	if c.skip >= c.tokens {
		return 0
	}
	for l := range to.layers {
		for i := range to.contents {
			k := &to.contents[i]
			first, end, size := c.first/to.ratio, c.tokens/to.ratio, k.bytes
			each := func(row, x uint64) (e, col, in uint64) { return row, 0, x }
			switch {
			case to.state:
				first, end, size = 0, k.rows, k.bytes*k.cols
				each = func(row, x uint64) (e, col, in uint64) { return row, x / k.bytes, x % k.bytes }
			case to.opaque:
				first, end, size = c.first/to.n, (c.tokens+to.n-1)/to.n, k.bytes*to.n
				each = func(row, x uint64) (e, col, in uint64) {
					return row*to.n + x/k.bytes, 0, x % k.bytes
				}
			}
			u := digest.Units{Layer: fmt.Sprintf("layers.%d", l), Role: k.role, Head: size,
				Row: k.own * size, TileRows: end, Tiles: 1, Cell: size, Cols: 1, FirstHead: k.first,
				Heads: k.own, FirstRow: first, Rows: end - first}
			if u.Rows == 0 {
				continue
			}
			mem := make([]byte, 0, end*k.own*size)
			for row := range end {
				for h := range k.own {
					for x := range size {
						e, col, in := each(row, x)
						mem = append(mem, c.model(l, k.role, k.first+h, e, col, in))
					}
				}
			}
			n, err := c.key.Sum(mem, &u, []uint32{0})
			if err != nil {
				t.Fatal(err)
			}
			all = digest.Add(all, n)
		}
	}
	return all
}

// differs compares the content in two memories of the receiver by the reference's addresses.
func (c *contents) differs(a, b []byte) bool {
	if c.skip >= c.tokens {
		return false
	}
	// a copy of the receiver's blocks to themselves visits every byte of the content
	differs := false
	for l := range c.to.layers {
		first, end := c.first, c.tokens
		moved(c.to, c.to, l, l, c.tt, c.tt, first, end, func(_ layout.Role, at, _ uint64) {
			differs = differs || a[at] != b[at]
		})
	}
	return differs
}

// fault is an error that leaves other bytes in the receiver's memory than the transfer meant.
type fault struct {
	name   string
	inject func(c *contents, whole []byte) []byte
}

// again is the receiver's memory if the transfer had moved other content or used another table.
func again(c *contents, whole []byte, table []uint32, model modelByte) []byte {
	mem := slices.Clone(whole)
	fill(c.to, 0, table, c.first, c.tokens, mem, model)
	return mem
}

var faults = []fault{
	{"a flipped bit", func(c *contents, whole []byte) []byte {
		mem := slices.Clone(whole)
		mem[c.rng.IntN(len(mem))] ^= 1 << c.rng.IntN(8)
		return mem
	}},
	{"two equal flips", func(c *contents, whole []byte) []byte {
		mem, bit := slices.Clone(whole), c.rng.IntN(8)
		for range 2 {
			mem[c.rng.IntN(len(mem))] ^= 1 << bit
		}
		return mem
	}},
	{"a burst of other bytes", func(c *contents, whole []byte) []byte {
		mem := slices.Clone(whole)
		at := c.rng.IntN(len(mem))
		copy(mem[at:min(at+1+c.rng.IntN(64), len(mem))], random(64, c.rng.Uint64()))
		return mem
	}},
	{"lost writes", func(c *contents, whole []byte) []byte {
		mem, old := slices.Clone(whole), random(c.to.size, 1)
		at := c.rng.IntN(len(mem))
		end := min(at+1+c.rng.IntN(64), len(mem))
		copy(mem[at:end], old[at:end])
		return mem
	}},
	{"a stale page", func(c *contents, whole []byte) []byte {
		stale := random(c.to.size, c.rng.Uint64())
		mem, l := slices.Clone(whole), c.rng.IntN(c.to.layers)
		b := c.rng.IntN(len(c.tt))
		moved(c.to, c.to, l, l, c.tt, c.tt, uint64(b)*c.to.n, uint64(b+1)*c.to.n,
			func(_ layout.Role, at, _ uint64) { mem[at] = stale[at] })
		return mem
	}},
	{"swapped pages", func(c *contents, whole []byte) []byte {
		table := slices.Clone(c.tt)
		a, b := c.rng.IntN(len(table)), c.rng.IntN(len(table))
		table[a], table[b] = table[b], table[a]
		return again(c, whole, table, c.model)
	}},
	{"another head", func(c *contents, whole []byte) []byte {
		return again(c, whole, c.tt, func(layer int, role layout.Role, head, e, col, x uint64) byte {
			return c.model(layer, role, head^1, e, col, x)
		})
	}},
	{"shifted tokens", func(c *contents, whole []byte) []byte {
		return again(c, whole, c.tt, func(layer int, role layout.Role, head, e, col, x uint64) byte {
			return c.model(layer, role, head, e+1, col, x)
		})
	}},
	{"two tokens exchanged", func(c *contents, whole []byte) []byte {
		a, b := c.rng.Uint64N(c.tokens), c.rng.Uint64N(c.tokens)
		return again(c, whole, c.tt, func(layer int, role layout.Role, head, e, col, x uint64) byte {
			switch e {
			case a:
				e = b
			case b:
				e = a
			}
			return c.model(layer, role, head, e, col, x)
		})
	}},
	{"another layer", func(c *contents, whole []byte) []byte {
		return again(c, whole, c.tt, func(layer int, role layout.Role, head, e, col, x uint64) byte {
			return c.model(layer+1, role, head, e, col, x)
		})
	}},
	{"V for K", func(c *contents, whole []byte) []byte {
		return again(c, whole, c.tt, func(layer int, role layout.Role, head, e, col, x uint64) byte {
			switch role {
			case layout.RoleK:
				role = layout.RoleV
			case layout.RoleConvK:
				role = layout.RoleConvQ
			}
			return c.model(layer, role, head, e, col, x)
		})
	}},
	{"shifted columns", func(c *contents, whole []byte) []byte {
		return again(c, whole, c.tt, func(layer int, role layout.Role, head, e, col, x uint64) byte {
			return c.model(layer, role, head, e, col+1, x+1)
		})
	}},
}

// move copies the prompt as planned with another registry, or with plans that wrong has changed. It
// reports false if nothing could be planned.
func (c *contents) move(reg *Registry, mem []byte, wrong func(*Plan)) bool {
	for i := range c.shares {
		source := c.shares[i].Source
		plan, err := NewShare(reg, c.layouts[source], c.dst, &c.shares[i], uint32(c.tokens),
			repeat(uint32(c.skip), len(c.to.groups)))
		if err != nil {
			return false
		}
		if wrong != nil {
			wrong(plan)
		}
		for l := range c.dst.NumLayers() {
			for part := range plan.Parts(l) {
				runs, _, _, err := plan.Runs(nil, l, part, repeat(c.ft, len(c.layouts[source].Groups)),
					repeat(c.tt, len(c.to.groups)))
				if err != nil {
					return false
				}
				for b := range layout.Explode(runs) {
					if !moveBytes(mem, c.mems[source], b) {
						return false
					}
				}
			}
		}
	}
	return true
}

// moveBytes reports false outside the memory.
func moveBytes(to, from []byte, b layout.IpcBlock) bool {
	if b.DstOff > uint64(len(to)) || b.Len > uint64(len(to))-b.DstOff ||
		b.SrcOff > uint64(len(from)) || b.Len > uint64(len(from))-b.SrcOff {
		return false
	}
	copy(to[b.DstOff:b.DstOff+b.Len], from[b.SrcOff:])
	return true
}

// noticed moves one drawn prompt wrongly and compares the digests. It returns whether the content
// was wrong, or an error if digest and content disagree.
func noticed(t *rapid.T, reg, planned *Registry, f *family, wrong func(*Plan)) (bool, error) {
	p := drawPrompt(t, reg, f)
	c := newContents(t, reg, p, rapid.Uint64().Draw(t, "seed"))
	whole, mem := random(p.to.size, 1), random(p.to.size, 1)
	c.fill(p.to, 0, p.tt, p.first, whole)
	if !c.move(planned, mem, wrong) {
		return false, nil
	}
	differs := c.differs(mem, whole)
	if got := c.received(t, mem); (got != c.sent) != differs {
		return false, fmt.Errorf("digests %#x and %#x, content differs %v", got, c.sent, differs)
	}
	return differs, nil
}

// TestContentOfMutants: if plans come from a strategy with a mistake of TestMutants, and digests
// from the right one, the digests differ whenever other content was moved.
func TestContentOfMutants(t *testing.T) {
	if testutil.Race {
		testutil.Skip(t, "norace", "ten times slower with -race; make test-go runs it without")
	}
	const (
		seeds     = 100
		other     = 5  // cases of a mistake that does not apply to the strategy
		enough    = 10 // wrong copies by one mistake
		minCaught = 5  // mistakes that make wrong copies
	)
	right := Default()
	homes := familiesOf(t)
	for _, b := range builtins {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			caught := 0
			for _, bug := range bugs {
				changed := false
				all := make([]Strategy, 0, len(builtins))
				for _, o := range builtins {
					if o == b {
						all = append(all, mutant{b, func(g *layout.Group, ps []layout.Plane) []layout.Plane {
							before := slices.Clone(ps)
							ps = bug.wrong(g, ps)
							changed = changed || !harmless(before, ps)
							return ps
						}})
						continue
					}
					all = append(all, o)
				}
				reg, err := NewRegistry(all...)
				if err != nil {
					t.Fatal(err)
				}
				hits := 0
				for seed := 0; seed < seeds && hits < enough && (changed || seed < other); seed++ {
					f := &homes[b.name][seed%len(homes[b.name])]
					var wrong bool
					err := rapid.Custom(func(t *rapid.T) error {
						var err error
						wrong, err = noticed(t, right, reg, f, nil)
						return err
					}).Example(seed)
					if err != nil {
						t.Fatalf("%s, seed %d: %v", bug.name, seed, err)
					}
					if wrong {
						hits++
					}
				}
				if hits > 0 {
					caught++
				}
			}
			if caught < minCaught {
				t.Errorf("only %d mistakes made a wrong copy, want %d", caught, minCaught)
			}
			t.Logf("%d mistakes made wrong copies, each noticed", caught)
		})
	}
}

// wrongPlans are mistakes in a plan that was made from right descriptions.
var wrongPlans = []struct {
	name  string
	wrong func(s *segment, p *pair)
}{
	{"the source's offset", func(_ *segment, p *pair) { p.from.off++ }},
	{"the receiver's offset", func(_ *segment, p *pair) { p.to.off += p.cell }},
	{"one head less", func(_ *segment, p *pair) { p.heads = max(p.heads-1, 1) }},
	{"the next head", func(_ *segment, p *pair) { p.from.off += p.from.head }},
	{"heads in reverse", func(_ *segment, p *pair) {
		p.from.off += (p.heads - 1) * p.from.head
		p.from.head = -p.from.head
	}},
	{"one head for all", func(_ *segment, p *pair) { p.from.head = 0 }},
	{"one row for all", func(_ *segment, p *pair) { p.from.row = 0 }},
	{"one column less", func(_ *segment, p *pair) { p.cols = max(p.cols-1, 1) }},
	{"rows of the next block", func(_ *segment, p *pair) { p.from.off += p.from.block }},
	{"one block for all", func(_ *segment, p *pair) { p.from.block = 0 }},
	{"a byte less of each cell", func(_ *segment, p *pair) { p.cell = max(p.cell-1, 1) }},
	{"the first block left out", func(s *segment, _ *pair) { s.block0++ }},
	{"kernel pages ignored", func(_ *segment, p *pair) { p.from.tile = p.from.row * p.from.tileRows }},
	{"another layer of the source", func(_ *segment, p *pair) { p.from.off += p.from.block * 2 }},
}

// TestContentOfWrongPlans: the digests differ whenever a wrong plan has moved other content.
func TestContentOfWrongPlans(t *testing.T) {
	if testutil.Race {
		testutil.Skip(t, "norace", "ten times slower with -race; make test-go runs it without")
	}
	const seeds, minWrong = 1500, 10
	reg := Default()
	for _, m := range wrongPlans {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			hits := 0
			for seed := 0; seed < seeds && hits < 40; seed++ {
				var wrong bool
				err := rapid.Custom(func(t *rapid.T) error {
					var err error
					f := &families[seed%len(families)]
					wrong, err = noticed(t, reg, reg, f, func(p *Plan) { mutate(p, m.wrong) })
					return err
				}).Example(seed)
				if err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				if wrong {
					hits++
				}
			}
			if hits < minWrong {
				t.Errorf("%d of %d plans moved other content, want %d", hits, seeds, minWrong)
			}
		})
	}
}

// mutate changes all pairs of a plan, and what follows from them.
func mutate(p *Plan, wrong func(*segment, *pair)) {
	for i := range p.segs {
		s := &p.segs[i]
		s.pairs = slices.Clone(s.pairs)
		for k := range s.pairs {
			wrong(s, &s.pairs[k])
			s.pairs[k].full = s.pairs[k].shape(s.pairs[k].step)
		}
	}
}

// TestContentRefusals: wrong arguments are refused with their field.
func TestContentRefusals(t *testing.T) {
	reg := Default()
	c := kvCache(PackedNHD, &dims{layers: 1, n: 4, blocks: 2, kvHeads: 2, head: 4, size: 1})
	l := c.layout()
	if _, err := NewContent(reg, l, l, nil, 0, []uint32{0}); err == nil {
		t.Error("no tokens: accepted")
	}
	if _, err := NewContent(reg, l, l, nil, 8, nil); err == nil {
		t.Error("no skip: accepted")
	}
	content, err := NewContent(reg, l, l, nil, 8, []uint32{0})
	if err != nil {
		t.Fatal(err)
	}
	key := digest.NewKey([digest.SeedBytes]byte{1})
	mem := make([]byte, c.size)
	for what, bad := range map[string]struct {
		regions [][]byte
		table   [][]uint32
	}{
		"short table":  {[][]byte{mem}, [][]uint32{{0}}},
		"no table":     {[][]byte{mem}, nil},
		"no region":    {nil, [][]uint32{{0, 1}}},
		"short region": {[][]byte{mem[1:]}, [][]uint32{{0, 1}}},
		"block":        {[][]byte{mem}, [][]uint32{{0, 2}}},
	} {
		if _, err := content.Digest(reg, key, l, bad.regions, bad.table); err == nil {
			t.Errorf("%s: accepted", what)
		}
	}
	if n, err := content.Digest(reg, key, l, [][]byte{mem}, [][]uint32{{0, 1}}); err != nil || n != 0 {
		t.Errorf("zeros have the digest %#x, %v", n, err)
	}
	if bytes.Count(mem, []byte{0}) != len(mem) {
		t.Error("the memory has changed")
	}
}
