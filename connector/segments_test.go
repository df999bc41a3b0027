package connector_test

import (
	"errors"
	"testing"

	"github.com/kvspray/kvspray/connector"
	"github.com/kvspray/kvspray/connector/msg"
	"github.com/kvspray/kvspray/control/engines"
)

// hungFiles is a control layer whose file system hangs, and which then refuses the segment.
type hungFiles struct {
	connector.Segments
	opening, release, closed chan struct{}
}

func (h *hungFiles) OpenFile(s *connector.Segment) error {
	close(h.opening)
	<-h.release
	s.File = h
	return nil
}

func (h *hungFiles) Register(*engines.Worker, connector.Segment) error {
	return errors.New("not now")
}

func (h *hungFiles) Close() error {
	close(h.closed)
	return nil
}

// A file system that hangs holds up neither the worker's submissions nor its cancels, and the file
// of a refused segment is closed.
func TestOpeningFilesHoldsNoLock(t *testing.T) {
	h := &hungFiles{opening: make(chan struct{}), release: make(chan struct{}),
		closed: make(chan struct{})}
	r := start(t, func(o *connector.Options) { o.Segments = h })
	w := r.worker(t, nil)
	answer := make(chan error, 1)
	ctx := testContext(t)
	go func() { answer <- w.Segment(ctx, msg.Segment{Name: "file", Path: "page"}) }()
	defer func() { // also if the test fails: Serve waits for the reader
		select {
		case <-h.release:
		default:
			close(h.release)
		}
	}()
	<-h.opening
	lease, err := w.Intent(intent(16, 0))
	must(t, err)
	r.rec.until(t, "the submission", func() bool { return len(r.rec.intents) == 1 })
	must(t, w.Cancel(lease, "", true))
	r.rec.until(t, "the cancel", func() bool { _, ok := r.rec.cancels[lease]; return ok })
	close(h.release)
	if err := <-answer; err == nil {
		t.Error("a refused segment was registered")
	}
	<-h.closed
}
