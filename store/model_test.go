package store

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/object/objecttest"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// model is what a store may and must have.
type model struct {
	durable map[int]bool // it must have, unless it was given up
	may     map[int]bool // it may have; anything else is a miss
}

// The whole, memory over a disk and an object store, against a map, with the power lost, errors and
// flipped bits at any operation of the disk, and the same of requests and objects, some of which
// arrive late. Namespaces are removed while they are open, closed, given up, and not found by the
// last start. The store is
// large enough to give nothing up, so that every page that was acknowledged as durable must be
// served after every crash; or small, and then no page is wrong.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		large := rapid.Bool().Draw(t, "large")
		writeBack := rapid.Bool().Draw(t, "write-back")
		size := 1<<20 + 8*simSegment
		if large {
			size = 1<<20 + 100*simSegment
		}
		sim := disktest.New(size, rapid.Uint64().Draw(t, "seed"))
		bucketOf, objects := objecttest.New(), rapid.Bool().Draw(t, "objects")
		atPut, diskless := rapid.Bool().Draw(t, "at put"), objects && rapid.Bool().Draw(t, "diskless")
		var process *objecttest.Process
		start := func() *Store {
			c := Config{WriteBack: writeBack}
			if objects {
				process = bucketOf.Open()
				c.OpenedObject, c.ObjectAtPut = bucketWith(t, process, soon), atPut
			}
			if diskless {
				return tiered(t, nil, c)
			}
			return tiered(t, sim, c)
		}
		s := start()
		names := []string{"a", "b"} // and c, which is open while it is used only
		sizes := []int{4096, 9_999}
		const closed = 2
		var engines []*engine
		models := []model{{map[int]bool{}, map[int]bool{}}, {map[int]bool{}, map[int]bool{}},
			{map[int]bool{}, map[int]bool{}}}
		var pins []*Pins
		damaged := false // bits flipped or reads failed: what is durable may be lost then
		dark := false    // the power goes, or has gone
		open := func() {
			engines = nil
			for i, name := range names {
				engines = append(engines, newEngine(t, s, name, sizes[i]))
			}
		}
		shutAll := func() {
			for _, p := range pins {
				p.Release()
			}
			pins = nil
			for _, e := range engines {
				e.close()
			}
			_ = s.Close() // its disk may be without power
		}
		open()
		defer func() { shutAll() }()
		pages := func(t *rapid.T) []int {
			from := rapid.IntRange(0, 60).Draw(t, "from")
			return upTo(from, from+rapid.IntRange(1, 25).Draw(t, "pages"))
		}
		which := rapid.IntRange(0, 1)
		visit := func(use func(e *engine)) {
			e := newEngine(t, s, "c", 4096)
			defer e.close()
			use(e)
		}
		put := func(t *rapid.T, e *engine, m *model) {
			list := pages(t)
			for n, r := range e.put(list...) {
				m.may[list[n]] = true
				if r.Durable {
					m.durable[list[n]] = true
				}
			}
		}
		verifyIn := func(e *engine, i int) {
			m := models[i]
			for from := 0; from < 90; from += 45 {
				for n, r := range e.get(upTo(from, from+45)...) {
					page := from + n
					switch {
					case r.Outcome == Hit && !m.may[page]:
						t.Fatalf("engine %d, page %d: it was removed, or never put: %+v", i, page, r)
					case r.Outcome != Hit && m.durable[page] && large && !damaged && !dark:
						t.Fatalf("engine %d, page %d: it was durable: %+v", i, page, r)
					}
				}
			}
		}
		verify := func(i int) {
			if i == closed {
				visit(func(e *engine) { verifyIn(e, i) })
				return
			}
			verifyIn(engines[i], i)
		}
		t.Repeat(map[string]func(*rapid.T){
			"put": func(t *rapid.T) {
				i := which.Draw(t, "engine")
				put(t, engines[i], &models[i])
			},
			"put and close": func(t *rapid.T) {
				visit(func(e *engine) { put(t, e, &models[closed]) })
			},
			"remove closed": func(t *rapid.T) {
				ns := namespace("c", 4096)
				clear(models[closed].durable)
				if s.RemoveSpace(ns.ID()) == nil {
					clear(models[closed].may)
				}
			},
			"give up": func(*rapid.T) { // as for another namespace, when all numbers are in use
				ns := namespace("c", 4096)
				clear(models[closed].durable)
				s.mu.Lock()
				sp := s.spaces[ns.ID()]
				s.mu.Unlock()
				if sp == nil {
					return
				}
				s.memory.RemoveOwner(sp.number)
				if s.disk != nil {
					s.disk.Forget(sp.number)
				}
				s.mu.Lock()
				defer s.mu.Unlock()
				s.reclaimLocked()
			},
			"unreadable": func(*rapid.T) { // a start reads no segment
				shutAll()
				sim.Crash()
				damaged, dark = true, false
				sim.Fail(func(op string, off int64) error {
					if op == "read" && off >= 1<<20 {
						return unix.EIO
					}
					return nil
				})
				s = start()
				sim.Fail(nil)
				open()
			},
			"late": func(*rapid.T) { bucketOf.Deliver() },
			"get": func(t *rapid.T) {
				i := which.Draw(t, "engine")
				engines[i].get(pages(t)...)
			},
			"cancel": func(t *rapid.T) {
				e := engines[which.Draw(t, "engine")]
				list := pages(t)
				b, err := e.space.Get(e.keys(list), e.pool, e.blocks(len(list)))
				if err != nil {
					t.Fatal(err)
				}
				b.Cancel()
				<-b.Done()
			},
			"flush": func(t *rapid.T) {
				if err := s.Flush(context.Background()); err != nil {
					t.Fatal(err)
				}
			},
			"all from below": func(t *rapid.T) { // memory has none of them
				if err := s.Flush(context.Background()); err != nil {
					t.Fatal(err)
				}
				e := engines[which.Draw(t, "engine")]
				s.memory.RemoveOwner(e.space.number)
				e.get(pages(t)...)
			},
			"pin": func(t *rapid.T) {
				e := engines[which.Draw(t, "engine")]
				if len(pins) < 3 {
					p, err := e.space.Pin(e.keys(pages(t)))
					if err != nil {
						t.Fatal(err)
					}
					pins = append(pins, p)
				}
			},
			"unpin": func(t *rapid.T) {
				if len(pins) > 0 {
					pins[0].Release()
					pins = pins[1:]
				}
			},
			"remove": func(t *rapid.T) {
				if rapid.IntRange(0, 3).Draw(t, "seldom") > 0 {
					return
				}
				i := which.Draw(t, "engine")
				m := models[i]
				clear(m.durable)
				if engines[i].space.Remove() == nil {
					clear(m.may)
				}
			},
			"power": func(t *rapid.T) { // it goes soon; until then all goes on
				dark = true
				sim.LosePower(rapid.IntRange(1, 30).Draw(t, "operations"))
			},
			"crash": func(t *rapid.T) {
				if objects {
					process.Kill()
				}
				shutAll()
				sim.Crash()
				dark = false
				s = start()
				open()
				for i := range models {
					verify(i)
				}
			},
			"restart": func(t *rapid.T) {
				shutAll()
				sim.Crash() // what was not synced need not stay
				dark = false
				s = start()
				open()
			},
			"object store": func(t *rapid.T) { // some requests fail, lose their answer, or are damaged
				kind := rapid.IntRange(0, 6).Draw(t, "kind")
				every := int64(rapid.IntRange(1, 4).Draw(t, "every"))
				var n atomic.Int64
				bucketOf.Fail(func(op, _ string) objecttest.Fault {
					if n.Add(1)%every != 0 || kind == 0 || kind == 6 && op != "put" && op != "delete" {
						return objecttest.Fault{}
					}
					return []objecttest.Fault{{}, {Err: errors.New("503")},
						{Lost: errors.New("no answer")}, {Cut: 5000}, {Flip: 3000},
						{Hold: make(chan struct{})}, {Late: errors.New("no answer")}}[kind]
				})
			},
			"object": func(t *rapid.T) { // one is gone, cut, or has a flipped bit
				names := bucketOf.Names()
				if len(names) < 2 || rapid.IntRange(0, 3).Draw(t, "seldom") > 0 {
					return
				}
				name := rapid.SampledFrom(names).Draw(t, "name")
				if !strings.Contains(name, "/pages/") {
					return
				}
				data := bucketOf.Data(name)
				if len(data) == 0 { // it is deleted, or was cut before
					return
				}
				switch rapid.IntRange(0, 2).Draw(t, "damage") {
				case 0:
					data = nil
				case 1:
					data = data[:rapid.IntRange(0, len(data)-1).Draw(t, "length")]
				default:
					at := rapid.IntRange(0, len(data)-1).Draw(t, "byte")
					data[at] ^= 1 << rapid.UintRange(0, 7).Draw(t, "bit")
				}
				bucketOf.Set(name, data)
			},
			"fail": func(t *rapid.T) {
				if rapid.Bool().Draw(t, "heal") {
					sim.Fail(nil)
					return
				}
				op := rapid.SampledFrom([]string{"read", "write", "sync"}).Draw(t, "operation")
				every := rapid.IntRange(1, 4).Draw(t, "every")
				n := 0
				damaged = damaged || op == "read"
				sim.Fail(func(o string, _ int64) error {
					if o != op {
						return nil
					}
					if n++; n%every == 0 {
						return unix.EIO
					}
					return nil
				})
			},
			"flip": func(t *rapid.T) {
				if rapid.IntRange(0, 5).Draw(t, "seldom") == 0 {
					damaged = true
					sim.Flip(rapid.IntRange(1<<20, size-1).Draw(t, "byte"), rapid.UintRange(0, 7).Draw(t, "bit"))
				}
			},
			"verify": func(t *rapid.T) { verify(rapid.IntRange(0, closed).Draw(t, "engine")) },
		})
	})
}
