package store

import (
	"sync/atomic"

	"github.com/kvspray/kvspray/store/catalog"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/page"
)

// tier is what memory, the disk and the object store have in common. A namespace is named by its
// number. How pages come to a tier and go from there differs: a put goes down from memory, a get
// fills memory, and other nodes are only asked.
type tier interface {
	// SetOwner makes or changes a namespace: the size of its pages, its quota and its reserve.
	SetOwner(n uint16, id page.ID, pageBytes int, quota, reserve uint64) error
	// DropOwner forgets a namespace, so that its number can be another's. If that has pages that would
	// be lost, it returns false, and changes nothing.
	DropOwner(n uint16) bool
	Exists(n uint16, keys []page.Key, found page.Bitmap)
	// Keep finds a page and protects it from eviction, until Release.
	Keep(n uint16, k *page.Key) (catalog.Pinned, bool, error)
	Release(p catalog.Pinned)
	Used(n uint16) uint64
	Capacity() uint64
	Close() error
}

// noTier is one that a store does not have.
type noTier struct{}

func (noTier) SetOwner(uint16, page.ID, int, uint64, uint64) error        { return nil }
func (noTier) DropOwner(uint16) bool                                      { return true }
func (noTier) Exists(uint16, []page.Key, page.Bitmap)                     {}
func (noTier) Keep(uint16, *page.Key) (p catalog.Pinned, _ bool, _ error) { return p, false, nil }
func (noTier) Release(catalog.Pinned)                                     {}
func (noTier) Used(uint16) uint64                                         { return 0 }
func (noTier) Capacity() uint64                                           { return 0 }
func (noTier) Close() error                                               { return nil }

// memoryTier is memory as a tier.
type memoryTier struct{ *memory.Tier }

func (t memoryTier) SetOwner(n uint16, _ page.ID, pageBytes int, quota, reserve uint64) error {
	return t.Tier.SetOwner(n, pageBytes, quota, reserve)
}

func (t memoryTier) Close() error {
	t.Tier.Close()
	return nil
}

// objectTier is the object store as a tier, which has numbers of its own for namespaces.
type objectTier struct {
	*object.Tier
	owners [MaxSpaces]atomic.Pointer[object.Owner] // by the store's number; nil: not in use
}

func (t *objectTier) SetOwner(n uint16, id page.ID, pageBytes int, quota, reserve uint64) error {
	o, err := t.Owner(id, pageBytes, quota, reserve)
	if err != nil {
		return err
	}
	if before := t.owners[n].Swap(o); before != nil {
		before.Close() // this use of it
	}
	return nil
}

func (t *objectTier) DropOwner(n uint16) bool {
	if o := t.owners[n].Swap(nil); o != nil {
		o.Close()
	}
	return true
}

func (t *objectTier) Exists(n uint16, keys []page.Key, found page.Bitmap) {
	t.owners[n].Load().Exists(keys, found)
}

func (t *objectTier) Keep(n uint16, k *page.Key) (catalog.Pinned, bool, error) {
	return t.owners[n].Load().Keep(k)
}

func (t *objectTier) Used(n uint16) uint64 { return t.owners[n].Load().Used() }
