package mem

import "fmt"

// MaxHandleBytes bounds the opaque name of device memory.
const MaxHandleBytes = 256

// Device reaches memory that no system call and no load of this process does: that of a GPU. One
// Device serves every region of its GPU; devices are compared with ==. Safe for concurrent use.
// Calls wait for the hardware: when one returns, with an error or without, nothing of it is in
// flight, so that a guard held around it covers every byte.
type Device interface {
	// Gather reads blocks, all of this device's regions, one after another into dst; Scatter writes
	// them from src. The lengths add up to that of the slice. A slice of a lent buffer needs no
	// further copy.
	Gather(dst []byte, blocks []Block) error
	Scatter(blocks []Block, src []byte) error
	// Move copies the bytes of src, in order, to dst. Both hold as many; at least one block is this
	// device's, the others may lie anywhere.
	Move(dst, src []Block) error
	// Lend gives a buffer of LendBytes that the hardware reaches at its full rate, or nil while none
	// is free. Return takes it back.
	Lend() []byte
	Return([]byte)
	LendBytes() int
}

// Warmer is a Device whose first copy after a pause takes longer than the others.
type Warmer interface {
	Device
	// Warm makes a short copy of memory of its own, where others are about to follow.
	Warm()
}

// DeviceMemory describes one region of a Device.
type DeviceMemory struct {
	Device Device
	Addr   uint64 // in this process, for the Device
	Size   uint64
	// what other processes of this host import it by; opaque outside the Device's package
	Handle []byte
	FD     int    // a descriptor that goes with the handle, owned by the region; -1: none
	Free   func() // called once, after the last reference is gone
}

// NewDevice makes a region of a device's memory.
func NewDevice(id ID, m DeviceMemory) (*Region, error) {
	if m.Size == 0 || m.Size > MaxRegionBytes || m.Addr == 0 || m.Addr > maxAddress-m.Size {
		return nil,
			fmt.Errorf("mem: device region %s: address %#x, size %d: not a range of device memory", id,
				m.Addr, m.Size)
	}
	if len(m.Handle) > MaxHandleBytes {
		return nil, fmt.Errorf("mem: device region %s: handle of %d bytes, at most %d", id, len(m.Handle),
			MaxHandleBytes)
	}
	r := &Region{id: id, kind: KindDevice, size: m.Size, base: m.Addr, device: m.Device,
		handle: m.Handle, free: m.Free}
	if m.FD >= 0 {
		r.file = NewFile(m.FD)
	}
	r.refs.Store(1)
	return r, nil
}

// Lent makes a region of a buffer of d, or returns nil while none is free. The last Release returns
// the buffer.
func Lent(d Device) *Region {
	p := d.Lend()
	if p == nil {
		return nil
	}
	r := &Region{id: NewID(), kind: KindLent, size: uint64(len(p)), bytes: p,
		free: func() { d.Return(p) }}
	r.refs.Store(1)
	return r
}

// Device is what reaches the region's bytes; nil for host memory.
func (r *Region) Device() Device { return r.device }

// Handle names device memory to other processes of this host; nil for host memory.
func (r *Region) Handle() []byte { return r.handle }

// DeviceOf returns the device of the first block that has one.
func DeviceOf(blocks []Block) Device {
	for i := range blocks {
		if d := blocks[i].Region.device; d != nil {
			return d
		}
	}
	return nil
}

// Gather reads blocks of any memory into dst, one after another.
func Gather(dst []byte, blocks []Block) error {
	return byDevice(blocks, dst, Device.Gather, func(p []byte, b Block) error {
		return b.Region.ReadAt(
			p, b.Off)
	})
}

// Scatter writes blocks of any memory from src, one after another.
func Scatter(blocks []Block, src []byte) error {
	return byDevice(blocks, src, func(d Device, p []byte, b []Block) error { return d.Scatter(b, p) },
		func(p []byte, b Block) error { return b.Region.WriteAt(p, b.Off) })
}

// byDevice hands runs of blocks of one device over together.
func byDevice(blocks []Block, p []byte, many func(Device, []byte, []Block) error, one func([]byte,
	Block) error) error {
	for i := 0; i < len(blocks); {
		d := blocks[i].Region.device
		n, j := blocks[i].Len, i+1
		for d != nil && j < len(blocks) && blocks[j].Region.device == d {
			n += blocks[j].Len
			j++
		}
		if n > uint64(len(p)) {
			return fmt.Errorf("mem: blocks of %d bytes and more beside a buffer of %d: %w", n,
				len(p), ErrBounds)
		}
		var err error
		if d == nil {
			err = one(p[:n], blocks[i])
		} else {
			err = many(d, p[:n], blocks[i:j])
		}
		if err != nil {
			return err
		}
		p, i = p[n:], j
	}
	return nil
}
