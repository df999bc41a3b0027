// Package memory opens the memory that an engine passes with REGISTER.
//
// An Intake checks that no memory is named twice, under whatever id or view. It owns everything
// that it has opened until the registration is complete. No goroutines.
package memory

import (
	"errors"
	"fmt"
	"math"
	"os"
	"slices"

	"github.com/kvspray/kvspray/connector/internal/eventfd"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// maxBoardBytes bounds a flags or rings memfd: two rings of the largest size and their headers.
const maxBoardBytes = 2*board.RingMaxBytes + 1<<20

// Importer makes regions of GPU memory that engines share.
type Importer interface {
	Import(id mem.ID, handle []byte, fd int, size uint64) (*mem.Region, error)
}

// Intake takes the descriptors of one REGISTER and opens the memory behind them.
type Intake struct {
	Extents []Extent // of everything that it has opened

	fds     []int // of the packet; a taken one is -1
	pid     int32
	devices Importer // nil: GPU memory is refused
	files   map[[2]uint64]string
	undo    []func()
}

// NewIntake returns an Intake for the descriptors of a packet from process pid.
func NewIntake(fds []int, pid int32, devices Importer) *Intake {
	return &Intake{fds: fds, pid: pid, devices: devices, files: map[[2]uint64]string{}}
}

// Undo releases everything that was opened.
func (in *Intake) Undo() {
	for _, f := range in.undo {
		f()
	}
}

func refuse(code, field string, err error, remedy string) error {
	return &msg.Refusal{Code: code, Field: field, Err: err, Remedy: remedy}
}

// take removes a descriptor from the packet. Each may be named once.
func (in *Intake) take(field string, index uint32) (fd int, err error) {
	if uint64(index) >= uint64(len(in.fds)) {
		return -1, refuse(msg.CodeProtocol, field, fmt.Errorf("index %d, %d descriptors came", index,
			len(in.fds)), "send the descriptor in the same packet")
	}
	if in.fds[index] < 0 {
		return -1, refuse(msg.CodeProtocol, field, fmt.Errorf("descriptor %d is named twice", index),
			"send one descriptor for each use")
	}
	if _, _, err := inode(in.fds[index]); err != nil {
		return -1, refuse(msg.CodeProtocol, field, err, "send an open descriptor")
	}
	fd, in.fds[index] = in.fds[index], -1
	return fd, nil
}

// takeFile is take for a file that will be mapped. Each may be named once: two views of one memory
// would be overlapping regions. A refused descriptor stays in the packet.
func (in *Intake) takeFile(field string, index uint32) (fd int, size uint64, err error) {
	if fd, err = in.take(field, index); err != nil {
		return -1, 0, err
	}
	defer func() {
		if err != nil {
			in.fds[index], fd = fd, -1
		}
	}()
	ino, size, err := inode(fd)
	if err != nil {
		return fd, 0, refuse(msg.CodeProtocol, field, err, "send an open descriptor")
	}
	if other, dup := in.files[ino]; dup {
		return fd, 0, refuse(msg.CodeRegion, field, fmt.Errorf("the same memory as %s", other),
			"register each memory once, as one region")
	}
	e := Extent{File: ino, to: max(size, 1), Field: field}
	if o := Overlapping(in.Extents, &e); o != nil {
		return fd, 0, refuse(msg.CodeRegion, field,
			fmt.Errorf("the same memory as %s, which is a view of it", o.Field), "register each memory "+
				"once, as one region")
	}
	in.files[ino] = field
	in.Extents = append(in.Extents, e)
	return fd, size, nil
}

// Board maps flags, rings or work memory.
func (in *Intake) Board(field string, index uint32) (*mem.Region, error) {
	fd, size, err := in.takeFile(field, index)
	if err != nil {
		return nil, err
	}
	if size > maxBoardBytes {
		_ = os.NewFile(uintptr(fd), field).Close()
		return nil, refuse(msg.CodeBoard, field, fmt.Errorf("%d bytes, at most %d", size, maxBoardBytes),
			"use smaller rings")
	}
	r, err := mem.MapMemfd(mem.NewID(), fd, size, mem.PopulatePresent())
	if err != nil {
		_ = os.NewFile(uintptr(fd), field).Close()
		return nil, refuse(msg.CodeBoard, field, err, "create it with memfd_create(MFD_ALLOW_SEALING), "+
			"size it, then add F_SEAL_SHRINK|F_SEAL_GROW|F_SEAL_SEAL")
	}
	in.undo = append(in.undo, r.Release)
	return r, nil
}

// Eventfd takes an eventfd.
func (in *Intake) Eventfd(field string, index uint32) (int, error) {
	fd, err := in.take(field, index)
	if err != nil {
		return -1, err
	}
	in.undo = append(in.undo, func() { _ = os.NewFile(uintptr(fd), field).Close() })
	if err := eventfd.Check(fd); err != nil {
		return -1, refuse(msg.CodeBoard, field, err, "create it with eventfd(0, EFD_NONBLOCK | "+
			"EFD_CLOEXEC)")
	}
	return fd, nil
}

// Regions opens the regions of REGISTER, in order.
func (in *Intake) Regions(all []msg.Region) ([]*mem.Region, error) {
	var out []*mem.Region
	ids := map[[16]byte]int{}
	for i := range all {
		field := fmt.Sprintf("regions[%d]", i)
		id := all[i].Region
		if id == ([16]byte{}) {
			return nil, refuse(msg.CodeRegion, field+".region", errors.New("id is all zero"),
				"send 16 random bytes")
		}
		if j, dup := ids[id]; dup {
			return nil, refuse(msg.CodeRegion, field+".region", fmt.Errorf("the id of regions[%d]", j),
				"draw a fresh random id for each region")
		}
		ids[id] = i
		r, err := in.region(field, all[:i+1], out)
		if err != nil {
			return nil, err
		}
		in.undo = append(in.undo, r.Release)
		out = append(out, r)
	}
	return out, nil
}

// region opens the last of all; opened are the regions of the others.
func (in *Intake) region(field string, all []msg.Region, opened []*mem.Region) (*mem.Region,
	error) {
	d := &all[len(all)-1]
	fd := -1
	if d.FD != msg.NoFD {
		var err error
		if d.Kind == msg.KindMemfd || d.Kind == msg.KindAdopted {
			fd, _, err = in.takeFile(field+".fd", d.FD)
		} else {
			fd, err = in.take(field+".fd", d.FD)
		}
		if err != nil {
			return nil, err
		}
	}
	var r *mem.Region
	var err error
	switch d.Kind {
	case msg.KindMemfd:
		r, err = mem.MapMemfd(d.Region, fd, d.Bytes, mem.PopulatePresent())
	case msg.KindAdopted:
		r, err = mem.MapMemfd(d.Region, fd, d.Bytes, mem.Adopted(), mem.PopulatePresent())
	case msg.KindProcess:
		r, err = in.process(field, fd, all)
	case msg.KindDevice:
		r, err = in.device(d, fd, opened)
	default:
		err = fmt.Errorf("kind %q is unknown, want memfd, adopted, process or device", d.Kind)
	}
	if err == nil {
		return r, nil
	}
	switch {
	case r != nil:
		r.Release() // r owns fd
	case fd >= 0:
		_ = os.NewFile(uintptr(fd), field).Close()
	}
	return nil, refuse(msg.CodeRegion, field, err, "see docs/protocol.md, REGISTER")
}

// process opens the last of all, memory of the engine's process. With an error it returns the
// region, if there is one.
func (in *Intake) process(field string, fd int, all []msg.Region) (*mem.Region, error) {
	d := &all[len(all)-1]
	if err := disjoint(all[:len(all)-1], d); err != nil {
		return nil, err
	}
	r, err := mem.OpenProcess(d.Region, fd, d.Addr, d.Bytes)
	if err != nil {
		return r, err
	}
	views, err := viewed(in.pid, d.Addr, d.Bytes, field)
	for k := range views {
		if o := Overlapping(in.Extents, &views[k]); err == nil && o != nil {
			err = fmt.Errorf("[%#x, +%d) is a view of the memory of %s", d.Addr, d.Bytes, o.Field)
		}
	}
	in.Extents = append(in.Extents, views...)
	return r, err
}

var errNoDevices = errors.New("this sidecar uses no GPU: transports.gpu.enabled is off, or it " +
	"found no driver; its log and 'kvspray doctor' name the reason")

// device imports GPU memory. With an error it returns the region, if there is one.
func (in *Intake) device(d *msg.Region, fd int, opened []*mem.Region) (*mem.Region, error) {
	if in.devices == nil {
		return nil, errNoDevices
	}
	r, err := in.devices.Import(d.Region, d.Handle, fd, d.Bytes)
	if err != nil {
		return r, err
	}
	if i := SameDevice(opened, r); i >= 0 {
		return r, fmt.Errorf("the same memory as regions[%d], or a part of it", i)
	}
	return r, nil
}

// SameDevice finds the region in all that shares GPU memory with r, because an already imported
// handle is imported at the same address. -1: none, or r is not GPU memory.
func SameDevice(all []*mem.Region, r *mem.Region) int {
	return slices.IndexFunc(all, func(o *mem.Region) bool {
		return r.Device() != nil && o.Device() == r.Device() && r.Base() < o.Base()+o.Size() &&
			o.Base() < r.Base()+r.Size()
	})
}

// disjoint refuses process regions that share addresses.
func disjoint(before []msg.Region, d *msg.Region) error {
	for i := range before {
		o := &before[i]
		if o.Kind != msg.KindProcess || d.Bytes > math.MaxUint64-d.Addr {
			continue
		}
		if d.Addr < o.Addr+o.Bytes && o.Addr < d.Addr+d.Bytes {
			return fmt.Errorf("[%#x, +%d) overlaps regions[%d]", d.Addr, d.Bytes, i)
		}
	}
	return nil
}
