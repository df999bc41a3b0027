// Package disktest is a disk for tests of the store: in memory, with power losses at any operation,
// torn writes, errors and flipped bits. Its owner is the test; it starts no goroutine.
package disktest

import (
	"errors"
	"math/rand/v2"
	"sync"
)

// unit is what offsets and lengths are multiples of.
const unit = 4096

const sector = 512 // what a disk writes at once

// ErrPower is what every operation returns once the power is off.
var ErrPower = errors.New("the power is off")

// Sim is a disk in memory that loses power: what was not synced is then kept in any sectors, or
// not.
type Sim struct {
	mu      sync.Mutex // guards what follows
	r       *rand.Rand
	durable []byte
	now     []byte // what readers see
	pending []write
	ops     int
	offAt   int
	off     bool
	fault   func(op string, off int64) error
	hold    func()
	holdW   func()
	holdS   func()
}

type write struct {
	off  int64
	data []byte
}

// New makes a disk of zeros. One seed gives one way of losing what was not synced.
func New(size int, seed uint64) *Sim {
	return &Sim{r: rand.New(rand.NewPCG(seed, 1)), durable: make([]byte, size), now: make([]byte,
		size)}
}

func (f *Sim) step(op string, off int64) error {
	if f.off {
		return ErrPower
	}
	if f.fault != nil {
		if err := f.fault(op, off); err != nil {
			return err
		}
	}
	if op == "read" {
		return nil
	}
	f.ops++
	f.off = f.ops == f.offAt
	return nil
}

// ReadAt is disk.File.
func (f *Sim) ReadAt(p []byte, off int64) error {
	f.mu.Lock()
	hold := f.hold
	f.mu.Unlock()
	if hold != nil {
		hold()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.step("read", off); err != nil {
		return err
	}
	if off%unit != 0 || len(p)%unit != 0 {
		return errors.New("not aligned")
	}
	if copy(p, f.now[off:]) != len(p) {
		return errors.New("past the end")
	}
	return nil
}

// WriteAt is disk.File.
func (f *Sim) WriteAt(bufs [][]byte, off int64) error {
	f.mu.Lock()
	hold := f.holdW
	f.mu.Unlock()
	if hold != nil {
		hold()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.step("write", off); err != nil {
		return err
	}
	for _, b := range bufs {
		if off%unit != 0 || len(b)%unit != 0 || int(off)+len(b) > len(f.now) {
			return errors.New("not aligned, or past the end")
		}
		f.pending = append(f.pending, write{off, append([]byte(nil), b...)})
		copy(f.now[off:], b)
		off += int64(len(b))
	}
	if f.off {
		return ErrPower
	}
	return nil
}

// Sync is disk.File.
func (f *Sim) Sync() error {
	f.mu.Lock()
	hold := f.holdS
	f.mu.Unlock()
	if hold != nil {
		hold()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.step("sync", 0); err != nil {
		return err
	}
	if f.off {
		return ErrPower
	}
	for _, w := range f.pending {
		copy(f.durable[w.off:], w.data)
	}
	f.pending = nil
	return nil
}

// Close is disk.File. The disk keeps what it has.
func (f *Sim) Close() error { return nil }

// Crash turns the power off and on: of what was not synced, each sector is kept or not, whatever
// its neighbors do.
func (f *Sim) Crash() {
	f.mu.Lock()
	defer f.mu.Unlock()
	keep := f.r.IntN(101)
	for _, w := range f.pending {
		for i := 0; i < len(w.data); i += sector {
			if f.r.IntN(100) < keep {
				copy(f.durable[int(w.off)+i:], w.data[i:i+sector])
			}
		}
	}
	copy(f.now, f.durable)
	f.pending, f.off, f.offAt, f.ops, f.fault = nil, false, 0, 0, nil
}

// Ops is how many writes and syncs there were since the disk was made or crashed.
func (f *Sim) Ops() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ops
}

// LosePower turns the power off at the nth write or sync from now on.
func (f *Sim) LosePower(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.offAt = f.ops + n
}

// Fail has fault decide about each operation ("read", "write", "sync"); nil: all succeed.
func (f *Sim) Fail(fault func(op string, off int64) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fault = fault
}

// Flip flips a bit of a byte.
func (f *Sim) Flip(at int, bit uint) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.now[at] ^= 1 << bit
	f.durable[at] ^= 1 << bit
}

// Size is its bytes.
func (f *Sim) Size() int { return len(f.now) }

// Hold has every read call hold before it begins; nil: none.
func (f *Sim) Hold(hold func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hold = hold
}

// HoldWrites has every write call hold before it begins; nil: none.
func (f *Sim) HoldWrites(hold func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.holdW = hold
}

// HoldSyncs has every sync call hold before it begins; nil: none.
func (f *Sim) HoldSyncs(hold func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.holdS = hold
}
