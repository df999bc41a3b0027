package store

import (
	"context"
	"slices"
	"testing"

	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/object/objecttest"
	"github.com/kvspray/kvspray/store/page"
)

func (s *Store) usageOf(id page.ID) Usage {
	all := s.Usage()
	if i := slices.IndexFunc(all, func(u Usage) bool { return u.ID == id }); i >= 0 {
		return all[i]
	}
	return Usage{}
}

// A namespace beyond its quota gives up its own pages in each tier, and another one keeps its own,
// although they are older.
func TestAFloodGivesUpItsOwnPages(t *testing.T) {
	const size = 4096
	shares := Shares{Memory: Share{Quota: 20 * size}, Disk: Share{Quota: 400 << 10},
		Object: Share{Quota: 100 * (size + 72)}}
	objects := objecttest.New()
	sim := disktest.New(8<<20, 1)
	open := func() (*Store, *engine, *engine) {
		s := tiered(t, sim, Config{OpenedObject: bucket(t, objects.Open()), ObjectAtPut: true,
			Shares: func(page.ID) Shares { return shares }})
		quiet, loud := newEngine(t, s, "quiet", size), newEngine(t, s, "loud", size)
		return s, quiet, loud
	}
	s, quiet, loud := open()
	quiet.put(upTo(0, 10)...)
	for at := 0; at < 600; at += 50 {
		loud.put(upTo(at, at+50)...)
		flush(t, s)
		u := s.usageOf(loud.space.id)
		if u.Bytes[Memory] > shares[Memory].Quota || u.Bytes[Disk] > shares[Disk].Quota ||
			u.Bytes[Object] > shares[Object].Quota {
			t.Fatalf("beyond its quota: %+v", u)
		}
	}
	u := s.usageOf(quiet.space.id)
	if u.Bytes[Memory] != 10*size || u.Bytes[Disk] == 0 || u.Bytes[Object] != 10*(size+72) ||
		u.Stored != 10 {
		t.Errorf("the quiet one has lost pages: %+v", u)
	}
	if rs := quiet.get(upTo(0, 10)...); count(rs, Hit) != 10 {
		t.Errorf("%+v", rs)
	}
	if u := s.usageOf(quiet.space.id); u.Hits != 10 || u.Misses != 0 {
		t.Errorf("%+v", u)
	}
	if loud.get(599)[0].Outcome != Hit || loud.get(0)[0].Outcome != Miss {
		t.Error("the flood keeps its latest pages only")
	}
	quiet.close()
	loud.close()
	shut(t, s)

	// After a restart the quotas count for what is found, before an engine comes.
	s, quiet, loud = open()
	defer shut(t, s)
	defer quiet.close()
	defer loud.close()
	if err := s.object.Ready(context.Background()); err != nil {
		t.Fatal(err)
	}
	loud.put(upTo(1000, 1050)...)
	if u := s.usageOf(loud.space.id); u.Bytes[Disk] == 0 || u.Bytes[Disk] > shares[Disk].Quota {
		t.Errorf("%+v", u)
	}
	if rs := quiet.get(upTo(0, 10)...); count(rs, Hit) != 10 {
		t.Errorf("%+v", rs)
	}
}

// What peers have this node read from its disk counts for the quota, too.
func TestQuotaOfANamespaceThatIsNotOpen(t *testing.T) {
	const size = 4096
	sim := disktest.New(8<<20, 1)
	s := onDisk(t, sim, false)
	e := newEngine(t, s, "a", size)
	e.put(upTo(0, 40)...)
	keys, id := e.keys(upTo(0, 40)), e.space.id
	e.close()
	shut(t, s)
	s = tiered(t, sim, Config{Shares: func(page.ID) Shares {
		return Shares{Memory: Share{Quota: 8 * size}}
	}})
	defer shut(t, s)
	if u := s.usageOf(id); u.Bytes[Disk] == 0 || u.Bytes[Memory] != 0 {
		t.Errorf("%+v", u)
	}
	for at := 0; at < 40; at += 4 {
		staged, err := s.Stage(id, size, keys[at:at+4])
		if err != nil || staged.Found.Count() != 4 {
			t.Fatal(err)
		}
		staged.Release()
	}
	if u := s.usageOf(id); u.Bytes[Memory] == 0 || u.Bytes[Memory] > 8*size {
		t.Errorf("%+v", u)
	}
}

// A quota without room for one page refuses the namespace, and does not keep it from being removed.
func TestQuotaThatIsTooSmall(t *testing.T) {
	const size = 4096
	sim := disktest.New(8<<20, 1)
	s := onDisk(t, sim, false)
	e := newEngine(t, s, "a", size)
	e.put(1)
	keys, id := e.keys([]int{1}), e.space.id
	e.close()
	shut(t, s)
	tiny := Share{Quota: 1}
	s = tiered(t, sim, Config{OpenedObject: bucket(t, objecttest.New().Open()),
		Shares: func(page.ID) Shares { return Shares{Memory: tiny, Disk: tiny, Object: tiny} }})
	defer shut(t, s)
	if _, err := s.Stage(id, size, keys); err == nil {
		t.Error("pages beyond the quota")
	}
	if err := s.RemoveSpace(id); err != nil || s.usageOf(id).Bytes[Disk] != 0 {
		t.Error(err)
	}
}
