// Package memory opens the memory that an engine passes with REGISTER and ADD_REGIONS.
//
// An Intake checks that no memory is named twice, under whatever id or view. It owns everything
// that a packet has opened until the packet is accepted. No goroutines.
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

// Intake takes the memory of one worker, packet by packet.
type Intake struct {
	Extents []Extent      // of everything that is open
	Regions []*mem.Region // likewise, in the order of their packets

	pid     int32
	devices Importer // nil: GPU memory is refused

	// Of the present packet.
	fds      []int                // a taken one is -1
	files    map[uint32]*mem.File // by index of the descriptor
	extents  int                  // length of Extents before it
	accepted int                  // likewise, of Regions
	undo     []func()             // for the board
}

// NewIntake returns an Intake for memory of process pid.
func NewIntake(pid int32, devices Importer) *Intake {
	return &Intake{pid: pid, devices: devices}
}

// Begin begins a packet with descriptors. Accept or Undo ends it.
func (in *Intake) Begin(fds []int) {
	in.fds, in.files, in.undo = fds, map[uint32]*mem.File{}, nil
	in.extents, in.accepted = len(in.Extents), len(in.Regions)
}

// Packet returns what the packet has opened.
func (in *Intake) Packet() ([]*mem.Region, []Extent) {
	return in.Regions[in.accepted:], in.Extents[in.extents:]
}

// Accept keeps everything that the packet has opened.
func (in *Intake) Accept() { in.end() }

// Undo releases everything that the packet has opened.
func (in *Intake) Undo() {
	for _, f := range in.undo {
		f()
	}
	for _, r := range in.Regions[in.accepted:] {
		r.Release()
	}
	in.Extents, in.Regions = in.Extents[:in.extents], in.Regions[:in.accepted]
	in.end()
}

func (in *Intake) end() {
	for _, f := range in.files {
		f.Release()
	}
	in.fds, in.files, in.undo = nil, nil, nil
}

// Forget forgets regions that are dropped.
func (in *Intake) Forget(regions []*mem.Region) {
	in.Extents = slices.DeleteFunc(slices.Clone(in.Extents), func(e Extent) bool {
		return e.Region != nil && slices.Contains(regions, e.Region)
	})
	in.Regions = slices.DeleteFunc(slices.Clone(in.Regions), func(r *mem.Region) bool {
		return slices.Contains(regions, r)
	})
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

// takeFile is take for the file of a region.
func (in *Intake) takeFile(field string, index uint32) (fd int, err error) {
	open := map[int]bool{}
	for _, r := range in.Regions {
		if r.FD() >= 0 {
			open[r.FD()] = true
		}
	}
	if len(open) >= msg.MaxRegionFiles {
		return -1, refuse(msg.CodeLimit, field, fmt.Errorf("the regions of this worker have %d files",
			len(open)), fmt.Sprintf("use at most %d: name several regions of one file by their offsets",
			msg.MaxRegionFiles))
	}
	return in.take(field, index)
}

// file returns the file of a region. Regions of one packet may share it.
func (in *Intake) file(field string, index uint32) (*mem.File, error) {
	if f := in.files[index]; f != nil {
		return f, nil
	}
	fd, err := in.takeFile(field, index)
	if err != nil {
		return nil, err
	}
	f := mem.NewFile(fd)
	in.files[index] = f
	return f, nil
}

// claim refuses memory that is named already.
func (in *Intake) claim(e Extent) error {
	o := Overlapping(in.Extents, &e)
	if o == nil {
		in.Extents = append(in.Extents, e)
		return nil
	}
	view := ""
	if o.Region != nil && o.Region.Kind() == mem.KindProcess {
		view = ", which is a view of it"
	}
	return refuse(msg.CodeRegion, e.Field, fmt.Errorf("the same memory as %s%s", o.Field, view),
		"register each memory once, as one region")
}

// Board maps flags, rings or work memory.
func (in *Intake) Board(field string, index uint32) (*mem.Region, error) {
	fd, err := in.take(field, index)
	if err != nil {
		return nil, err
	}
	ino, size, err := inode(fd)
	if err == nil {
		err = in.claim(Extent{File: ino, to: max(size, 1), Field: field})
	}
	if err != nil {
		_ = os.NewFile(uintptr(fd), field).Close()
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

// Open opens the regions of the packet, in order. The first one has the number first.
func (in *Intake) Open(all []msg.Region, first uint32) error {
	for i := range all {
		field := fmt.Sprintf("regions[%d]", i)
		if all[i].Region == ([16]byte{}) {
			return refuse(msg.CodeRegion, field+".region", errors.New("id is all zero"),
				"send 16 random bytes")
		}
		for j := range in.Extents {
			if o := &in.Extents[j]; o.Region != nil && o.Region.ID() == all[i].Region {
				return refuse(msg.CodeRegion, field+".region", fmt.Errorf("the id of %s", o.Field),
					"draw a fresh random id for each region")
			}
		}
		n := len(in.Extents)
		r, err := in.region(field, &all[i])
		if err != nil {
			return err
		}
		in.Regions = append(in.Regions, r)
		if len(in.Extents) == n {
			in.Extents = append(in.Extents, Extent{Field: field})
		}
		for k := range in.Extents[n:] {
			e := &in.Extents[n+k]
			e.Region = r
			if first > 0 { // other packets have regions with this index
				e.Field = fmt.Sprintf("region %d", first+uint32(i))
			}
		}
	}
	return nil
}

// region opens one region.
func (in *Intake) region(field string, d *msg.Region) (r *mem.Region, err error) {
	switch d.Kind {
	case msg.KindMemfd:
		r, err = in.mapped(field+".fd", d)
	case msg.KindProcess:
		r, err = in.process(field, d)
	case msg.KindDevice:
		r, err = in.device(field, d)
	default:
		err = fmt.Errorf("kind %q is unknown, want memfd, process or device", d.Kind)
	}
	var refused *msg.Refusal
	if err == nil || errors.As(err, &refused) {
		return r, err
	}
	return nil, refuse(msg.CodeRegion, field, err, "see docs/protocol.md, REGISTER")
}

// mapped maps a part of a file.
func (in *Intake) mapped(field string, d *msg.Region) (*mem.Region, error) {
	f, err := in.file(field, d.FD)
	if err != nil {
		return nil, err
	}
	ino, _, err := inode(f.FD())
	if err != nil {
		return nil, err
	}
	if d.Bytes > math.MaxUint64-d.Offset {
		return nil, fmt.Errorf("offset %d and %d bytes exceed every file", d.Offset, d.Bytes)
	}
	if err := in.claim(Extent{File: ino, from: d.Offset, to: d.Offset + max(d.Bytes, 1),
		Field: field}); err != nil {
		return nil, err
	}
	return f.Map(d.Region, d.Offset, d.Bytes, mem.PopulatePresent())
}

// process opens memory of the engine's process.
func (in *Intake) process(field string, d *msg.Region) (*mem.Region, error) {
	for i := range in.Extents {
		o := in.Extents[i].Region
		if o != nil && o.Kind() == mem.KindProcess && d.Bytes <= math.MaxUint64-d.Addr &&
			d.Addr < o.Base()+o.Size() && o.Base() < d.Addr+d.Bytes {
			return nil, fmt.Errorf("[%#x, +%d) overlaps %s", d.Addr, d.Bytes, in.Extents[i].Field)
		}
	}
	f, err := in.file(field+".fd", d.FD)
	if err != nil {
		return nil, err
	}
	r, err := f.Process(d.Region, d.Addr, d.Bytes)
	if err != nil {
		return nil, err
	}
	views, err := viewed(in.pid, d.Addr, d.Bytes, field)
	for k := range views {
		if o := Overlapping(in.Extents, &views[k]); err == nil && o != nil {
			err = fmt.Errorf("[%#x, +%d) is a view of the memory of %s", d.Addr, d.Bytes, o.Field)
		}
	}
	if err != nil {
		r.Release()
		return nil, err
	}
	in.Extents = append(in.Extents, views...)
	return r, nil
}

var errNoDevices = errors.New("this sidecar uses no GPU: transports.gpu.enabled is off, or it " +
	"found no driver; its log and 'kvspray doctor' name the reason")

// device imports GPU memory.
func (in *Intake) device(field string, d *msg.Region) (*mem.Region, error) {
	fd := -1
	if d.FD != msg.NoFD {
		var err error
		if fd, err = in.takeFile(field+".fd", d.FD); err != nil {
			return nil, err
		}
	}
	close := func() {
		if fd >= 0 {
			_ = os.NewFile(uintptr(fd), field).Close()
		}
	}
	if in.devices == nil {
		close()
		return nil, errNoDevices
	}
	r, err := in.devices.Import(d.Region, d.Handle, fd, d.Bytes)
	if err != nil {
		close()
		return nil, err
	}
	if o := SameDevice(in.Extents, r); o != nil {
		r.Release() // it owns fd
		return nil, fmt.Errorf("the same memory as %s, or a part of it", o.Field)
	}
	return r, nil
}

// SameDevice finds the region in all that shares GPU memory with r, because an already imported
// handle is imported at the same address. nil: none, or r is not GPU memory.
func SameDevice(all []Extent, r *mem.Region) *Extent {
	if r.Device() == nil {
		return nil
	}
	for i := range all {
		o := all[i].Region
		if o != nil && o.Device() == r.Device() && r.Base() < o.Base()+o.Size() &&
			o.Base() < r.Base()+r.Size() {
			return &all[i]
		}
	}
	return nil
}
