package disk

import (
	"encoding/binary"
	"fmt"

	"github.com/kvspray/kvspray/store/offheap"
)

// Of the note on the first device, behind the ledger.
const (
	magicNote = "KVSPNTE\x01"
	noteAt    = 512 << 10
	// MaxNoteBytes bounds a note.
	MaxNoteBytes = 64 << 10
	noteBytes    = block + MaxNoteBytes // of one copy
)

func notePlace(copy int) int64 { return noteAt + int64(copy)*noteBytes }

func encodeNote(b []byte, store storeID, generation uint64, note []byte) {
	le := binary.LittleEndian
	copy(b, magicNote)
	copy(b[16:], store[:])
	le.PutUint64(b[32:], generation)
	le.PutUint32(b[40:], uint32(len(note)))
	copy(b[headerBytes:], note)
	seal(b[:headerBytes+len(note)])
}

// parseNote returns generation 0 where there is no whole note of the store.
func parseNote(b []byte, store storeID) (generation uint64, note []byte) {
	le := binary.LittleEndian
	if len(b) < headerBytes || string(b[:8]) != magicNote || storeID(b[16:32]) != store {
		return 0, nil
	}
	n := le.Uint32(b[40:])
	if n > MaxNoteBytes || int(n) > len(b)-headerBytes || !sealed(b[:headerBytes+n], magicNote) {
		return 0, nil
	}
	return le.Uint64(b[32:]), b[headerBytes : headerBytes+n]
}

// Note returns what the last SetNote stored: a few bytes of the caller's, which live as long as the
// store. nil: there is none, or both copies are damaged.
func (t *Tier) Note() ([]byte, error) {
	t.notes.mu.Lock()
	defer t.notes.mu.Unlock()
	_, note, err := t.readNote()
	return note, err
}

// readNote returns the newer copy, and which one it is.
func (t *Tier) readNote() (newest int, note []byte, err error) {
	buf, err := offheap.New[byte](noteBytes)
	if err != nil {
		return 0, nil, err
	}
	defer buf.Free()
	l, found := t.logs[0], uint64(0)
	for i := range 2 {
		if rerr := l.file.ReadAt(buf.Elems(), notePlace(i)); rerr != nil {
			err = fmt.Errorf("store.disk path %s: note: %w", l.path, rerr)
			continue
		}
		if g, b := parseNote(buf.Elems(), t.id); g > found {
			found, newest = g, i
			note = append([]byte{}, b...)
		}
	}
	t.notes.last = max(t.notes.last, found)
	if note != nil {
		err = nil
	}
	return newest, note, err
}

// SetNote replaces the note, durably. After an error there is the earlier one, or this one.
func (t *Tier) SetNote(note []byte) error {
	if len(note) > MaxNoteBytes {
		return fmt.Errorf("store.disk: note of %d bytes: at most %d", len(note), MaxNoteBytes)
	}
	t.notes.mu.Lock()
	defer t.notes.mu.Unlock()
	newest, old, err := t.readNote()
	if err != nil {
		return err
	}
	to := 0
	if old != nil {
		to = 1 - newest
	}
	buf, err := offheap.New[byte](noteBytes)
	if err != nil {
		return err
	}
	defer buf.Free()
	l := t.logs[0]
	n := (headerBytes + len(note) + block - 1) / block * block
	encodeNote(buf.Elems(), t.id, t.notes.last+1, note)
	if err := l.durably([][]byte{buf.Elems()[:n]}, notePlace(to)); err != nil {
		return fmt.Errorf("store.disk path %s: note: %w", l.path, err)
	}
	t.notes.last++
	return nil
}
