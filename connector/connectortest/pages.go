package connectortest

import (
	"context"

	"github.com/kvspray/kvspray/connector/internal/session"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/internal/board"
)

// ask sends a request with a fresh id and waits for its answer.
func ask[T msg.Message](ctx context.Context, s *Session, request func(id uint64) msg.Message,
	fds ...int) (T, error) {
	c, err := s.conn()
	if err != nil {
		var none T
		return none, err
	}
	return session.Ask[T](ctx, c, request, fds...)
}

// OpenSpace opens a namespace of the store; pieces and blocks describe a worker's pool.
func (s *Session) OpenSpace(ctx context.Context, m msg.Open) (space uint64, err error) {
	a, err := s.Open(ctx, m)
	if err != nil {
		return 0, err
	}
	return a.Space, nil
}

// Open is OpenSpace, and returns the whole answer.
func (s *Session) Open(ctx context.Context, m msg.Open) (*msg.Opened, error) {
	return ask[*msg.Opened](ctx, s, func(id uint64) msg.Message { m.ID = id; return &m })
}

// CloseSpace closes what an OPEN has opened.
func (s *Session) CloseSpace(opened *msg.Opened) error {
	c, err := s.conn()
	if err != nil {
		return err
	}
	return c.Send(&msg.Close{Open: opened.ID})
}

// Exists asks which pages are there.
func (s *Session) Exists(ctx context.Context, m msg.Exists) (*msg.Found, error) {
	return ask[*msg.Found](ctx, s, func(id uint64) msg.Message { m.ID = id; return &m })
}

// Remove forgets the pages of a namespace.
func (s *Session) Remove(ctx context.Context, space uint64) error {
	_, err := ask[*msg.Done](ctx, s, func(id uint64) msg.Message {
		return &msg.Remove{ID: id, Space: space}
	})
	return err
}

// AddRegions adds regions, whose descriptors travel in the packet.
func (w *Worker) AddRegions(ctx context.Context, first uint32, all []msg.Region,
	fds ...int) error {
	_, err := ask[*msg.Done](ctx, &w.Session, func(id uint64) msg.Message {
		return &msg.AddRegions{ID: id, First: first, Regions: all}
	}, fds...)
	return err
}

// DropRegions takes regions back; it returns once nothing accesses them.
func (w *Worker) DropRegions(ctx context.Context, numbers ...uint32) error {
	_, err := ask[*msg.Done](ctx, &w.Session, func(id uint64) msg.Message {
		return &msg.DropRegions{ID: id, Regions: numbers}
	})
	return err
}

// Unpin ends the pins of an Exists.
func (s *Session) Unpin(found *msg.Found) error {
	c, err := s.conn()
	if err != nil {
		return err
	}
	return c.Send(&msg.Unpin{Pin: found.ID})
}

// Get opens a lease for pages of the store into blocks.
func (w *Worker) Get(m msg.Get) (lease uint64, err error) {
	lease = w.NewLease()
	return lease, w.Push(board.RecGet, lease, m.Append(nil), false)
}

// Put opens a lease for pages in blocks into the store.
func (w *Worker) Put(m msg.Put) (lease uint64, err error) {
	lease = w.NewLease()
	return lease, w.Push(board.RecPut, lease, m.Append(nil), false)
}

// Segment registers a segment.
func (w *Worker) Segment(ctx context.Context, m msg.Segment) error {
	_, err := ask[*msg.Done](ctx, &w.Session, func(id uint64) msg.Message { m.ID = id; return &m })
	return err
}

// Revoke takes a segment back, or the grants to one node; it returns once its batches are fenced.
func (w *Worker) Revoke(ctx context.Context, name, to string) error {
	_, err := ask[*msg.Done](ctx, &w.Session, func(id uint64) msg.Message {
		return &msg.Revoke{ID: id, Name: name, To: to}
	})
	return err
}

// Locate asks for a segment.
func (s *Session) Locate(ctx context.Context, m msg.Locate) (*msg.Located, error) {
	return ask[*msg.Located](ctx, s, func(id uint64) msg.Message { m.ID = id; return &m })
}

// Notes fetches notifications.
func (w *Worker) Notes(ctx context.Context, waitMS uint64) ([]msg.Note, error) {
	a, err := ask[*msg.Noted](ctx, &w.Session, func(id uint64) msg.Message {
		return &msg.Notes{ID: id, WaitMS: waitMS}
	})
	if err != nil {
		return nil, err
	}
	return a.Notes, nil
}

// Batch opens a batch.
func (w *Worker) Batch(m msg.Batch) (lease uint64, err error) {
	lease = w.NewLease()
	return lease, w.Push(board.RecBatch, lease, m.Append(nil), false)
}
