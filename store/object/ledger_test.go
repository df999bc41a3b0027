// SPDX-License-Identifier: Apache-2.0

package object_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/object/objecttest"
)

const (
	ledgerName  = "node1/ledger.kvspray"
	maxRemovals = 4096
)

// fillLedger has the ledger of a store that is closed name as many removed namespaces as it can.
func fillLedger(s *objecttest.Store) {
	b := s.Data(ledgerName)
	b = b[:128:128]
	binary.LittleEndian.PutUint32(b[64:], maxRemovals)
	for i := range maxRemovals {
		id := ns(fmt.Sprint("removed", i))
		b = append(b, id[:]...)
		b = binary.LittleEndian.AppendUint64(b, uint64(i)+1)
	}
	binary.LittleEndian.PutUint32(b[8:], 0)
	binary.LittleEndian.PutUint32(b[8:], mem.CRC32C(0, b))
	s.Set(ledgerName, append(bytes.Clone(b), b...))
}

// away opens a tier over a store that does not answer until Fail is called again.
func away(t *testing.T, s *objecttest.Store) *node {
	t.Helper()
	down := errors.New("down")
	s.Fail(func(string, string) objecttest.Fault { return objecttest.Fault{Err: down} })
	c := config(s.Open())
	c.Timeouts.Open = 100 * time.Millisecond
	tier, err := object.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	return &node{t: t, tier: tier}
}

// A removal that was asked for before the full ledger could be read makes it no longer than the
// next start reads.
func TestRemovalsBeforeFullLedgerIsRead(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	n.add(n.o, 0, 4)
	n.close()
	fillLedger(s)
	n = away(t, s)
	for i := range 3 {
		o := n.owner(fmt.Sprint("late", i))
		if err := o.Remove(t.Context()); !errors.Is(err, object.ErrAway) {
			t.Fatal(err)
		}
	}
	again := n.owner("removed7") // the ledger has it
	if err := again.Remove(t.Context()); !errors.Is(err, object.ErrAway) {
		t.Fatal(err)
	}
	s.Fail(nil)
	if err := n.tier.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := len(s.Data(ledgerName)); got != 2*(128+maxRemovals*40) {
		t.Errorf("the ledger has %d bytes", got)
	}
	late := n.owner("late0") // there is room now: of the oldest ones no object is left
	if err := late.Remove(t.Context()); err != nil {
		t.Error(err)
	}
	n.close()
	n = start(t, s)
	defer n.close()
	all(t, n.read(n.o, 0, 4), nil)
}

// A ledger that is written while its answers are lost is this process's own afterwards.
func TestLedgerAnswerLost(t *testing.T) {
	s := objecttest.New()
	n := start(t, s)
	n.add(n.o, 0, 4)
	n.flush()
	first, down := true, errors.New("down")
	s.Fail(func(op, _ string) objecttest.Fault {
		if op == "put" && first {
			first = false
			return objecttest.Fault{Lost: down}
		}
		return objecttest.Fault{Err: down}
	})
	if err := n.owner("b").Remove(t.Context()); !errors.Is(err, down) {
		t.Fatalf("%v", err)
	}
	s.Fail(nil)
	if err := n.o.Remove(t.Context()); err != nil {
		t.Error(err)
	}
	if st := n.tier.Stats(); st.Problem != "" || !st.Ready {
		t.Errorf("%+v", st)
	}
	n.close()
	n = start(t, s)
	defer n.close()
	all(t, n.read(n.o, 0, 4), object.ErrMissing)
}
