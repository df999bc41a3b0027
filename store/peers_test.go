package store

import (
	"bytes"
	"testing"

	"github.com/kvspray/kvspray/store/disk/disktest"
	"github.com/kvspray/kvspray/store/page"
)

// TestStageAfterARestart: pages that the disk has kept are there for peers before an engine opens
// their namespace, and for an engine afterwards.
func TestStageAfterARestart(t *testing.T) {
	sim := disktest.New(8<<20, 1)
	const pageBytes = 5000
	s := onDisk(t, sim, false)
	e := newEngine(t, s, "a", pageBytes)
	e.put(1, 2)
	keys, id, want := e.keys([]int{1, 2, 3}), e.space.id, e.content(1)
	e.close()
	shut(t, s)

	s = onDisk(t, sim, false)
	defer shut(t, s)
	staged, err := s.Stage(id, pageBytes, keys)
	if err != nil {
		t.Fatal(err)
	}
	memory, _ := s.Region().Bytes()
	if staged.Found.Count() != 2 || !bytes.Equal(memory[staged.Blocks[0].Off:][:pageBytes], want) {
		t.Fatalf("%d of 2 pages, or another one", staged.Found.Count())
	}
	staged.Release()
	if _, err := s.Stage(page.ID{1}, pageBytes, keys); err == nil {
		t.Error("a namespace without pages was found")
	}
	e = newEngine(t, s, "a", pageBytes)
	defer e.close()
	if got := e.get(1, 2, 3); count(got, Hit) != 2 {
		t.Errorf("%+v", got)
	}
}
