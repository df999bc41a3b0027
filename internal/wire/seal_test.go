package wire

import (
	"bytes"
	"crypto/rand"
	"errors"
	"testing"
)

func sealed(t testing.TB, every uint64) (*Sealer, *Opener) {
	t.Helper()
	secret := [32]byte{1}
	s, err := NewSealer(secret, DialerEnd)
	if err != nil {
		t.Fatal(err)
	}
	o, err := NewOpener(secret, DialerEnd)
	if err != nil {
		t.Fatal(err)
	}
	s.s.every, o.s.every = every, every
	return s, o
}

func open(o *Opener, rec []byte) ([]byte, error) {
	n, err := o.Length(rec)
	if err != nil {
		return nil, err
	}
	if n == 0 || len(rec) < n+RecordOverhead {
		return nil, ErrSealed
	}
	out := InPlace(rec, n)
	return out, o.Open(out, rec, n)
}

// Records open in their order, across changes of the key, in place and elsewhere; no two are alike,
// whatever they hold.
func TestSealed(t *testing.T) {
	s, o := sealed(t, 7)
	plain := make([]byte, RecordBytes)
	_, _ = rand.Read(plain)
	seen := map[string]bool{}
	keys := map[[32]byte]bool{}
	for i := range 50 {
		rec, err := s.Seal(nil, plain)
		if err != nil {
			t.Fatal(err)
		}
		if body := string(rec[recordHead:]); seen[body] {
			t.Fatal("two records of the same bytes are alike: a nonce was used twice")
		} else {
			seen[body] = true
		}
		keys[s.s.chain] = true
		got := make([]byte, len(plain))
		if i%2 == 0 {
			got, err = open(o, rec)
		} else {
			err = o.Open(got, rec, len(plain))
		}
		if err != nil || !bytes.Equal(got, plain) {
			t.Fatalf("record %d: %v", i, err)
		}
	}
	if len(keys) != 50/7+1 {
		t.Errorf("%d keys for 50 records of 7 each", len(keys))
	}
	if s.s.chain != o.s.chain {
		t.Error("the ends have different keys")
	}
}

// A record that is not the next one as it was sealed is refused by name, and so is all behind it.
func TestSealedAttacks(t *testing.T) {
	for name, c := range map[string]struct {
		attack func(recs [][]byte) []byte
		want   error
	}{
		"replayed":         {func(r [][]byte) []byte { return r[0] }, ErrReplayed},
		"reordered":        {func(r [][]byte) []byte { return r[2] }, ErrReordered},
		"a bit of the tag": {func(r [][]byte) []byte { r[1][len(r[1])-1] ^= 1; return r[1] }, ErrForged},
		"a bit of it":      {func(r [][]byte) []byte { r[1][recordHead] ^= 1; return r[1] }, ErrForged},
		"renumbered":       {func(r [][]byte) []byte { r[2][8] = 1; return r[2] }, ErrForged},
		"shortened":        {func(r [][]byte) []byte { r[1][4]--; return r[1] }, ErrForged},
		"too long":         {func(r [][]byte) []byte { r[1][7] = 1; return r[1] }, ErrSealed},
		"not sealed":       {func(r [][]byte) []byte { r[1][0]++; return r[1] }, ErrSealed},
	} {
		t.Run(name, func(t *testing.T) {
			s, o := sealed(t, rekeyRecords)
			var recs [][]byte
			for range 3 {
				r, err := s.Seal(nil, []byte("the bytes of a slice"))
				if err != nil {
					t.Fatal(err)
				}
				recs = append(recs, r)
			}
			if _, err := open(o, bytes.Clone(recs[0])); err != nil {
				t.Fatal(err)
			}
			if _, err := open(o, c.attack(recs)); !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
		})
	}
	// The records of the other direction, and of another opening, are nothing to this one.
	s, _ := sealed(t, rekeyRecords)
	rec, err := s.Seal(nil, []byte("x"))
	if err != nil {
		t.Fatal(err)
	}
	for what, o := range map[string]struct {
		secret [32]byte
		of     End
	}{"direction": {[32]byte{1}, AcceptorEnd}, "opening": {[32]byte{2}, DialerEnd}} {
		other, err := NewOpener(o.secret, o.of)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := open(other, bytes.Clone(rec)); !errors.Is(err, ErrForged) {
			t.Errorf("another %s: %v", what, err)
		}
	}
}

func FuzzOpen(f *testing.F) {
	s, _ := sealed(f, rekeyRecords)
	rec, err := s.Seal(nil, []byte("the bytes of a slice"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(rec)
	f.Add(rec[:5])
	f.Fuzz(func(t *testing.T, b []byte) {
		_, o := sealed(t, rekeyRecords)
		if got, err := open(o, bytes.Clone(b)); err == nil && !bytes.HasPrefix(b, rec) {
			t.Errorf("%x opened to %x", b, got)
		}
	})
}

func TestSealAllocates(t *testing.T) {
	s, o := sealed(t, rekeyRecords)
	plain, buf := make([]byte, RecordBytes), make([]byte, 0, RecordBytes+RecordOverhead)
	if n := testing.AllocsPerRun(100, func() {
		rec, err := s.Seal(buf, plain)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := open(o, rec); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations for a record sealed and opened", n)
	}
}

func BenchmarkSeal(b *testing.B) {
	s, o := sealed(b, rekeyRecords)
	plain, buf := make([]byte, RecordBytes), make([]byte, 0, RecordBytes+RecordOverhead)
	b.Run("seal and open", func(b *testing.B) {
		b.SetBytes(RecordBytes)
		for b.Loop() {
			rec, err := s.Seal(buf, plain)
			if err != nil {
				b.Fatal(err)
			}
			if _, err := open(o, rec); err != nil {
				b.Fatal(err)
			}
		}
	})
}
