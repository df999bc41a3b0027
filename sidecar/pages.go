package sidecar

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/control/driver"
	"github.com/kvspray/kvspray/control/engines"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/sys/limits"
	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/sidecar/internal/exchange"
	"github.com/kvspray/kvspray/sidecar/internal/local"
	"github.com/kvspray/kvspray/sidecar/internal/pages"
	"github.com/kvspray/kvspray/sidecar/internal/removals"
	"github.com/kvspray/kvspray/sidecar/internal/trace"
	"github.com/kvspray/kvspray/sidecar/internal/web"
	"github.com/kvspray/kvspray/store"
	"github.com/kvspray/kvspray/store/directory"
	"github.com/kvspray/kvspray/store/directory/embedded"
	"github.com/kvspray/kvspray/store/disk"
	"github.com/kvspray/kvspray/store/memory"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/object/s3"
	"github.com/kvspray/kvspray/transfer"
)

// pageStore is the node's store and what serves it to engines.
type pageStore struct {
	cfg       *config.Store
	leases    *local.Leases
	registry  *prometheus.Registry
	log       *slog.Logger
	transfers *trace.Lines
	complete  func(*engines.Worker, engines.Completion) error
	gossip    bool // there are other sidecars to ask
	grace     time.Duration
	boot      transfer.Boot
	conv      *conversation
	driver    *driver.Driver
	gpus      *gpus // nil: switched off

	store     *store.Store
	service   *pages.Service     // nil: there is no store
	exchange  *exchange.Exchange // nil: there is no store, or no directory
	directory directory.Directory
	embedded  *embedded.Directory // the same; nil: it is another one
	removals  *removals.Removals  // nil: there is no store
	members   memberCache
	tenants   tenants
}

// open opens the store, which takes its memory, until ctx ends, and reads its disks.
func (p *pageStore) open(ctx context.Context) (err error) {
	if p.cfg.Memory == 0 {
		return nil
	}
	if err := fits(p.cfg.Memory, ""); err != nil {
		return err
	}
	p.log.Info("the store takes its memory", "bytes", p.cfg.Memory.String())
	c := store.Config{Memory: memory.Config{Bytes: uint64(p.cfg.Memory),
		Populate: true, Stop: ctx.Done()}, WriteBack: p.cfg.WriteBack, Shares: p.shares}
	if p.gpus != nil {
		c.Copy = func(to, from []mem.Block) error {
			_, err := p.gpus.copy(to, from)
			return err
		}
	}
	if len(p.cfg.Disk) > 0 {
		c.Disk, c.EraseWithin = diskConfig(p.cfg), time.Duration(p.cfg.EraseWithin)
	}
	if o := p.cfg.Object; o.Bucket != "" {
		bucket, err := s3.Open(s3.Config{Endpoint: o.Endpoint, Region: o.Region, Bucket: o.Bucket})
		if err != nil {
			return fmt.Errorf("sidecar: %w", err)
		}
		c.Object, c.ObjectAtPut = &object.Config{Bucket: bucket, Prefix: o.Prefix,
			Size: uint64(o.Size)}, o.AtPut
	}
	if err := p.openDirectory(&c); err != nil {
		return err
	}
	if p.store, err = store.Open(c); err != nil {
		return errors.Join(fmt.Errorf("sidecar: %w", err), p.closeDirectory())
	}
	p.openRemovals(p.store)
	if p.exchange != nil {
		if err := p.exchange.Attach(p.store); err != nil {
			return errors.Join(err, p.close())
		}
	}
	m, err := metrics.NewStore(p.registry, p.sample)
	if err != nil {
		return errors.Join(fmt.Errorf("sidecar: metrics: %w", err), p.store.Close())
	}
	p.service = pages.New(pages.Options{Store: p.store,
		Shares: p.shares,
		Leases: p.leases, Metrics: m, Transfers: p.transfers, Log: p.log, Find: p.find(),
		Removals: p.removals,
		Complete: p.complete})
	st := p.store.Stats()
	p.log.Info("store", "memory", p.cfg.Memory.String(), "disks", len(p.cfg.Disk),
		"disk_pages", st.Disk.Pages, "disk_bytes", st.Disk.Bytes, "disk_capacity", st.Disk.Capacity)
	return nil
}

// fits refuses a store that this host has no memory for: taking it would have the kernel kill this
// process, or an engine.
// root is as for limits.ReadMemory.
func fits(want config.Size, root string) error {
	m, err := limits.ReadMemory(root)
	if err != nil {
		return nil //nolint:nilerr // unknown limits are no reason to refuse
	}
	if f := m.Fits(uint64(want)); f != nil {
		return fmt.Errorf("sidecar: store.memory: %q: %s: %s", want.String(), f.Why, f.Remedy)
	}
	return nil
}

// segmentShare is the minimum number of segments of a disk, if they are as small as they may be.
const (
	segmentShare    = 16
	minSegmentBytes = 1 << 20
)

func diskConfig(cfg *config.Store) *disk.Config {
	c := &disk.Config{SegmentBytes: int(cfg.Segment)}
	derive := c.SegmentBytes == 0
	if derive {
		c.SegmentBytes = disk.DefaultSegmentBytes
	}
	for _, d := range cfg.Disk {
		c.Devices = append(c.Devices, disk.Device{Path: d.Path, Size: int64(d.Size)})
		for derive && c.SegmentBytes > minSegmentBytes &&
			uint64(d.Size)/segmentShare < uint64(c.SegmentBytes) {
			c.SegmentBytes /= 2
		}
	}
	return c
}

// close ends the store. Its leases have ended.
func (p *pageStore) close() error {
	if p.store == nil {
		return nil
	}
	if p.exchange != nil { // after a failure this is not done yet
		p.leave()
	}
	arena := p.store.Region()
	pinned := p.gpus != nil && arena.Acquire() // it stays mapped until it is unpinned
	err := p.store.Close()
	if pinned {
		p.gpus.Forget([]*mem.Region{arena})
		arena.Release()
	}
	return errors.Join(err, p.closeDirectory())
}

// serves returns what serves pages; nil: nothing does.
func (p *pageStore) serves() connector.Store {
	if p.service == nil {
		return nil
	}
	return p.service
}

// gone closes the pools of a worker whose leases have ended.
func (p *pageStore) gone(w *engines.Worker) {
	if p.service != nil {
		p.service.Gone(w)
	}
}

// tiers returns the tiers that the store has, nearest first.
func (p *pageStore) tiers(st *store.Stats) []nodeapi.StoreTier {
	out := []nodeapi.StoreTier{{Name: "memory", Pages: uint64(st.Memory.Pages), Bytes: st.Memory.Bytes,
		Capacity: p.store.Region().Size(), Hits: st.Hits[store.Memory], Evicted: st.Memory.Evicted,
		EvictionAge: st.Memory.EvictionAge.Seconds()}}
	if len(p.cfg.Disk) > 0 {
		out = append(out, nodeapi.StoreTier{Name: "disk", Pages: st.Disk.Pages, Bytes: st.Disk.Bytes,
			Capacity: st.Disk.Capacity, Hits: st.Hits[store.Disk], Evicted: st.Disk.Evicted,
			EvictionAge: st.Disk.EvictionAge.Seconds(), Removed: st.Disk.Removed})
	}
	if p.cfg.Object.Bucket != "" {
		out = append(out, nodeapi.StoreTier{Name: "object", Pages: st.Object.Pages,
			Bytes: st.Object.Bytes, Capacity: st.Object.Capacity, Hits: st.Hits[store.Object],
			Evicted: st.Object.Evicted, EvictionAge: st.Object.EvictionAge.Seconds(),
			Removed: st.Object.Removed, Problem: st.Object.Problem})
	}
	if p.exchange != nil {
		out = append(out, nodeapi.StoreTier{Name: "peer", Hits: st.Hits[store.Peer]})
	}
	return out
}

// sample returns the store's state for metrics.
func (p *pageStore) sample() metrics.StoreSample {
	st := p.store.Stats()
	out := metrics.StoreSample{Tiers: map[string]metrics.StoreTier{},
		Results: map[string]float64{"miss": float64(st.Misses), "damaged": float64(st.Damaged),
			"stored": float64(st.Stored), "existed": float64(st.Existed), "refused": float64(st.Refused)},
		Damaged: float64(damaged(&st)), Failed: float64(st.Disk.Failed)}
	out.Namespaces = p.tenants.sample(p.store.Usage(), p.shares)
	for _, t := range p.tiers(&st) {
		out.Tiers[t.Name] = metrics.StoreTier{Pages: float64(t.Pages), Bytes: float64(t.Bytes),
			Capacity: float64(t.Capacity), Evicted: float64(t.Evicted), Hits: float64(t.Hits)}
	}
	return out
}

func damaged(st *store.Stats) uint64 { return st.Damaged + st.Disk.Damaged + st.Object.Damaged }

// state returns the store's state for /v1/store; nil: there is no store.
func (p *pageStore) state() *nodeapi.Store {
	if p.service == nil {
		return nil
	}
	st := p.store.Stats()
	out := &nodeapi.Store{Tiers: p.tiers(&st), Misses: st.Misses, Stored: st.Stored,
		Existed: st.Existed, Refused: st.Refused, Damaged: damaged(&st)}
	out.Namespaces, out.Pinned = p.service.Namespaces()
	out.Drained = p.service.Drained()
	for i := range out.Tiers {
		t := &out.Tiers[i]
		gets, bytes, took := p.service.Waits(t.Name)
		t.Gets, t.GetBytes, t.GetSeconds = gets, bytes, took.Seconds()
	}
	out.Removals.Known, out.Removals.Pending = p.removals.Stats()
	p.showPeers(out)
	return out
}

// calls returns what operators ask of the store; nil: there is none.
func (p *pageStore) calls() web.StoreCalls {
	if p.service == nil {
		return nil
	}
	return p.service
}
