package session

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// NewFlags makes the flags of a worker.
func NewFlags(boot [16]byte, layers int) (*mem.Region, *board.Flags, error) {
	r, b, err := newMemory("flags", board.FlagsBytes(layers))
	if err != nil {
		return nil, nil, err
	}
	f, err := board.InitFlags(b, boot, layers)
	if err != nil {
		r.Release()
		return nil, nil, err
	}
	return r, f, nil
}

// newMemory is mapped memory of whole pages.
func newMemory(name string, size int) (*mem.Region, []byte, error) {
	r, err := mem.NewAnonymous(name, uint64(size+4095)&^4095)
	if err != nil {
		return nil, nil, err
	}
	b, _ := r.Bytes()
	return r, b, nil
}

// Rings are the submission and the completion ring of one session.
type Rings struct {
	id      [16]byte
	mem     *mem.Region
	sub     *board.Producer
	comp    *board.Consumer
	sqEvent *os.File // wakes the sidecar
	cqEvent *os.File // wakes this process
}

// NewRings makes rings of these sizes, which are powers of two.
func NewRings(submission, completion int) (*Rings, error) {
	r := &Rings{}
	_, _ = rand.Read(r.id[:]) // it does not fail
	var err error
	var b []byte
	if r.mem, b, err = newMemory("rings", board.RingsBytes(submission, completion)); err != nil {
		return nil, err
	}
	view, err := board.InitRings(b, r.id, submission, completion)
	if err == nil {
		r.sqEvent, err = eventfd()
	}
	if err == nil {
		r.cqEvent, err = eventfd()
	}
	if err != nil {
		r.Close()
		return nil, err
	}
	r.sub, r.comp = view.SubmissionProducer(), view.CompletionConsumer()
	return r, nil
}

func eventfd() (*os.File, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	return os.NewFile(uintptr(fd), "eventfd"), nil
}

// Register begins a REGISTER: the board and its descriptors. Regions follow.
func (r *Rings) Register(flags *mem.Region) (m *msg.Register, fds []int) {
	m = &msg.Register{Session: r.id, FDs: msg.FDs{Flags: 0, Rings: 1, SQEventfd: 2, CQEventfd: 3}}
	return m, []int{flags.FD(), r.mem.FD(), fdOf(r.sqEvent), fdOf(r.cqEvent)}
}

// fdOf returns the number without taking the file out of the netpoller.
func fdOf(f *os.File) int {
	n := -1
	if rc, err := f.SyscallConn(); err == nil {
		_ = rc.Control(func(fd uintptr) { n = int(fd) })
	}
	return n
}

// Bytes is the memory of the rings.
func (r *Rings) Bytes() []byte {
	b, _ := r.mem.Bytes()
	return b
}

// Push writes a record, and wakes the sidecar if it sleeps.
func (r *Rings) Push(typ uint16, lease, epoch uint64, body []byte) error {
	wake, err := r.sub.Push(typ, 0, lease, epoch, body)
	if err != nil || !wake {
		return err
	}
	return r.Wake()
}

// Wake signals the sidecar.
func (r *Rings) Wake() error {
	one := binary.NativeEndian.AppendUint64(nil, 1)
	if _, err := r.sqEvent.Write(one); err != nil && !errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("wake the sidecar: %w", err)
	}
	return nil
}

// Poll takes one record of the completion ring if there is one. Its body is valid until the next
// call.
func (r *Rings) Poll() (rec board.Record, ok bool, err error) { return r.comp.Next() }

var longAgo, never = time.Unix(1, 0), time.Time{}

// Wait takes the next record. It waits on the eventfd until there is one.
func (r *Rings) Wait(ctx context.Context) (board.Record, error) {
	stop := context.AfterFunc(ctx, func() { _ = r.cqEvent.SetReadDeadline(longAgo) })
	defer func() {
		if !stop() {
			_ = r.cqEvent.SetReadDeadline(never)
		}
	}()
	var count [8]byte
	for {
		rec, ok, err := r.Poll()
		if err != nil || ok {
			return rec, err
		}
		if !r.comp.Sleep() {
			continue
		}
		if _, err := r.cqEvent.Read(count[:]); err != nil {
			if ctx.Err() != nil {
				return board.Record{}, ctx.Err()
			}
			if errors.Is(err, os.ErrDeadlineExceeded) {
				_ = r.cqEvent.SetReadDeadline(never) // left by an earlier Wait whose context ended
				continue
			}
			return board.Record{}, fmt.Errorf("CQ eventfd: %w", err)
		}
	}
}

// Close frees the rings. Nothing may use them any more.
func (r *Rings) Close() {
	for _, f := range []*os.File{r.sqEvent, r.cqEvent} {
		if f != nil {
			_ = f.Close()
		}
	}
	r.mem.Release()
}
