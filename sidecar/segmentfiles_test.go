package sidecar

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvspray/kvspray/connector/client"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/config"
)

// rootOf gives a node a directory for files.
func rootOf(t *testing.T) (dir string, change func(*config.Config)) {
	dir = t.TempDir()
	return dir, func(c *config.Config) { c.Segments.Root = dir }
}

func toEveryone() client.Grant {
	return client.Grant{To: client.Everyone, Read: true, Write: true}
}

// fill makes other bytes than there were.
func (c *goClient) fill(seed byte) []byte {
	b := c.mem.Bytes()
	for i := range b {
		b[i] = byte(i>>12+i*7) ^ seed
	}
	return b
}

// Batches read and write ranges of a file of another node and of the same node, aligned ones and
// others, and nothing besides.
func TestBatchesOfFiles(t *testing.T) {
	for _, order := range [][]string{{"tcp"}, {"shm", "tcp"}} {
		dir, rooted := rootOf(t)
		transports := func(c *config.Config) { c.Transports.Order = order }
		na := start(t, transports)
		nb := start(t, func(c *config.Config) { transports(c); rooted(c) })
		name := filepath.Join(dir, "kv.bin")
		model := bytes.Repeat([]byte("kvspray!"), lentBytes/8)
		ok(t, os.WriteFile(name, model, 0o600))
		owner := newGoClient(t, nb, "owner")
		ok(t, owner.RegisterFile(t.Context(), "kv", "kv.bin", 4096, 0, toEveryone()))
		f, err := owner.Find(t.Context(), "", "kv")
		if err != nil || f.Bytes != lentBytes-4096 {
			t.Fatalf("%+v, %v", f, err)
		}
		for i, at := range []*goClient{newGoClient(t, na, "user"), newGoClient(t, nb, "same")} {
			local := at.fill(byte(i))
			entries := []client.Entry{
				{Memory: at.mem, Local: 100, Remote: 0, Bytes: 1 << 20},
				{Memory: at.mem, Local: 2 << 20, Remote: 2<<20 + 3, Bytes: 777, Pieces: 50,
					LocalStride: 777, RemoteStride: 1000},
				{Memory: at.mem, Local: 3 << 20, Remote: 3 << 20, Bytes: 4096, Pieces: 20,
					LocalStride: 4096, RemoteStride: 8192},
			}
			each := func(f func(local, remote, n uint64)) {
				for _, e := range entries {
					for p := range uint64(max(e.Pieces, 1)) {
						f(e.Local+p*e.LocalStride, 4096+e.Remote+p*e.RemoteStride, e.Bytes)
					}
				}
			}
			b, err := at.Write(nb.Endpoint(), "kv", client.Options{Durable: i == 0, Note: []byte("kv")},
				entries...)
			if r := ended(t, b, err); r.Status != client.OK {
				t.Fatalf("%v: %+v", order, r)
			}
			each(func(l, r, n uint64) { copy(model[r:r+n], local[l:]) })
			if now := bytesOf(t, name); !bytes.Equal(now, model) {
				t.Fatalf("%v: the file has other bytes", order)
			}
			if notes, err := owner.Notes(t.Context(), patience); err != nil || len(notes) != 1 {
				t.Errorf("%+v, %v", notes, err)
			}
			clear(local)
			b, err = at.Read(nb.Endpoint(), "kv", client.Options{}, entries...)
			if r := ended(t, b, err); r.Status != client.OK {
				t.Fatalf("%v: %+v", order, r)
			}
			want := make([]byte, len(local))
			each(func(l, r, n uint64) { copy(want[l:l+n], model[r:]) })
			if !bytes.Equal(local, want) {
				t.Errorf("%v: other bytes were read", order)
			}
		}
	}
}

// Bad batches of files are refused by field, and change neither the file nor the memory.
func TestFileBatchRefusals(t *testing.T) {
	dir, rooted := rootOf(t)
	n := start(t, rooted)
	name := filepath.Join(dir, "kv.bin")
	before := bytes.Repeat([]byte{7}, 8192)
	ok(t, os.WriteFile(name, before, 0o600))
	ok(t, os.Symlink("kv.bin", filepath.Join(dir, "link")))
	c := newGoClient(t, n, "c")
	var refusal *client.Refusal
	for _, path := range []string{"../kv.bin", "/etc/passwd", "link", "none",
		strings.Repeat("x", 1025)} {
		err := c.RegisterFile(t.Context(), "bad", path, 0, 0, toEveryone())
		if err == nil || errors.As(err, &refusal) && refusal.Field != "path" {
			t.Errorf("%.20q: %v", path, err)
		}
	}
	ok(t, c.mem.Register(t.Context(), "memory", 1<<20, 4096, toEveryone()))
	ok(t, c.RegisterFile(t.Context(), "kv", "kv.bin", 0, 0, toEveryone()))
	big := newGoClient(t, start(t, rooted), "big")
	ok(t, os.WriteFile(filepath.Join(dir, "big"), nil, 0o600))
	ok(t, os.Truncate(filepath.Join(dir, "big"), 1<<30))
	ok(t, big.RegisterFile(t.Context(), "big", "big", 0, 0, toEveryone()))
	try := func(words, segment string, o client.Options, write bool, e client.Entry) {
		t.Helper()
		local := c.fill(1)
		want := bytes.Clone(local)
		send := c.Read
		if write {
			send = c.Write
		}
		b, err := send(n.Endpoint(), segment, o, e)
		if r := ended(t, b, err); r.Status != client.Refused || !strings.Contains(r.Reason, words) {
			t.Errorf("%+v, want a refusal with %q", r, words)
		}
		if now := bytesOf(t, name); !bytes.Equal(now, before) || !bytes.Equal(local, want) {
			t.Errorf("%s: refused, and bytes have changed", words)
		}
	}
	try("entries[0].remote", "kv", client.Options{}, true, c.at(8191, 2))
	try("durable", "memory", client.Options{Durable: true}, true, c.at(0, 1))
	ok(t, os.Truncate(name, 5000))
	before = before[:5000]
	try("shrunk to 5000", "kv", client.Options{}, false, c.at(4096, 4096))
	try("shrunk to 5000", "kv", client.Options{}, true, c.at(4096, 4096))
	more, err := big.NewMemory(t.Context(), 65<<20)
	ok(t, err)
	b, err := big.Write("", "big", client.Options{}, client.Entry{Memory: more, Bytes: 65 << 20})
	if r := ended(t, b, err); r.Status != client.Refused || !strings.Contains(r.Reason, "67108864") {
		t.Errorf("%+v", r)
	}
}

// Two batches of one file exclude each other, whatever name each uses.
func TestFilesExcludeByInode(t *testing.T) {
	dir, rooted := rootOf(t)
	_, _, na, nb, send := silentWith(t, rooted)
	ok(t, os.WriteFile(filepath.Join(dir, "a"), make([]byte, lentBytes), 0o600))
	ok(t, os.Link(filepath.Join(dir, "a"), filepath.Join(dir, "b")))
	user, owner := newGoClient(t, na, "user"), newGoClient(t, nb, "owner")
	for _, name := range []string{"a", "b"} {
		ok(t, owner.RegisterFile(t.Context(), name, name, 0, 0, toEveryone()))
	}
	first, err := user.Write(nb.Endpoint(), "a", client.Options{}, user.at(0, lentBytes))
	ok(t, err)
	until(t, func() bool { return nb.segments.Open() == 1 })
	second, err := owner.Read("", "b", client.Options{}, owner.at(5, 1))
	if r := ended(t, second, err); r.Status != client.Refused ||
		!strings.Contains(r.Reason, "which an open one writes") {
		t.Errorf("%+v", r)
	}
	// Its bytes are in the staging memory, not in the file: nothing of a batch that fails arrives.
	ok(t, owner.Revoke(t.Context(), "a", ""))
	send()
	if r := ended(t, first, nil); r.Status == client.OK || r.Arrived(0) {
		t.Errorf("%+v", r)
	}
	if now := bytesOf(t, filepath.Join(dir, "a")); !bytes.Equal(now, make([]byte, lentBytes)) {
		t.Error("a batch of a revoked segment has written")
	}
}

// The late-write attack on files: once the owner has the notification of a batch, or has revoked
// its segment, the file is never written again, although copies of chunks are in flight.
func TestLateWritesOfFiles(t *testing.T) {
	for name, revoked := range map[string]bool{"notified": false, "revoked": true} {
		t.Run(name, func(t *testing.T) { lateFiles(t, revoked) })
	}
}

func lateFiles(t *testing.T, revoked bool) {
	at := newAttack("tcp")
	dir, rooted := rootOf(t)
	p, d := attackedWith(t, at, rooted, "tcp")
	lanesUp(t, p, d, []string{"tcp"})
	user, owner := newGoClient(t, p, "user"), newGoClient(t, d, "owner")
	name := filepath.Join(dir, "kv.bin")
	canary := bytes.Repeat([]byte{0xa5}, lentBytes)
	rng := newRand(11)
	attacks, want := 0, attackRuns(t)/2
	for i := 0; attacks < want; i++ {
		if i > spareRuns*want {
			t.Fatalf("in only %d of %d runs a copy was in flight: nothing was attacked", attacks, i)
		}
		local := user.fill(byte(i))
		ok(t, os.WriteFile(name, make([]byte, lentBytes), 0o600))
		ok(t, owner.RegisterFile(t.Context(), "kv", "kv.bin", 0, 0, toEveryone()))
		at.begin(notEarly)
		b, err := user.Write(d.Endpoint(), "kv", client.Options{Note: []byte{1}},
			user.at(0, lentBytes))
		ok(t, err)
		if revoked {
			until(t, func() bool { return at.plan.Held() > 0 })
			spin(time.Duration(rng.IntN(1500)) * time.Microsecond)
			at.freeze()
		} else {
			if notes, err := owner.Notes(t.Context(), patience); err != nil || len(notes) != 1 {
				t.Fatalf("%+v, %v", notes, err)
			}
			if now := bytesOf(t, name); !bytes.Equal(now, local) {
				t.Fatal("the notification came before the bytes")
			}
		}
		ok(t, owner.Revoke(t.Context(), "kv", ""))
		ok(t, os.WriteFile(name, canary, 0o600))
		at.strike(t)
		if at.end(t) > 0 {
			attacks++
		}
		if r := ended(t, b, nil); !revoked && r.Status != client.OK {
			t.Errorf("%+v", r)
		}
		if now := bytesOf(t, name); !bytes.Equal(now, canary) {
			t.Fatalf("run %d: the file was written after the end of its batch", i)
		}
		if _, err := owner.Notes(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
	}
}

func bytesOf(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	ok(t, err)
	return b
}

// flights counts the slices that a node has in flight.
func flights(r *running) (n int) {
	r.driver.View(func(ex *exec.Exec, _ exec.Instant) { n = ex.Load().Flights })
	return n
}

// kill -9 of the owner's sidecar in each phase of a write to a file: the batch is not complete
// unless all bytes are in the file, and none comes later.
func TestFileOwnerKilled(t *testing.T) {
	for _, phase := range []string{"at once", "open", "first bytes", "last bytes"} {
		t.Run(phase, func(t *testing.T) {
			p := newProcess(t, "tcp")
			na := start(t, func(c *config.Config) { c.Transports.Order = []string{"tcp"} })
			name := filepath.Join(filepath.Dir(p.path), "kv.bin")
			ok(t, os.WriteFile(name, make([]byte, lentBytes), 0o600))
			user, owner := newGoClient(t, na, "user"), newGoClient(t, p.asRunning(), "owner")
			local := user.fill(3)
			local[0], local[lentBytes-1] = 1, 1
			ok(t, owner.RegisterFile(t.Context(), "kv", "kv.bin", 0, 0, toEveryone()))
			first, err := user.Read(p.endpoint, "kv", client.Options{}, user.at(1, 1))
			if r := ended(t, first, err); r.Status != client.OK {
				t.Fatalf("%+v", r)
			}
			b, err := user.Write(p.endpoint, "kv", client.Options{Durable: true}, user.at(0, lentBytes))
			ok(t, err)
			wrote := func(at int64) func() bool {
				f, err := os.Open(name)
				ok(t, err)
				t.Cleanup(func() { _ = f.Close() })
				return func() bool {
					var one [1]byte
					_, err := f.ReadAt(one[:], at)
					ok(t, err)
					return one[0] == 1 || done(b)
				}
			}
			switch phase {
			case "open":
				until(t, func() bool { return flights(na) > 0 || done(b) })
			case "first bytes":
				until(t, wrote(0))
			case "last bytes":
				until(t, wrote(lentBytes-1))
			}
			p.kill()
			r := ended(t, b, nil)
			now := bytesOf(t, name)
			if r.Status == client.OK && !bytes.Equal(now, local) {
				t.Error("complete, and the file has other bytes")
			}
			if r.Status != client.OK && (r.Status != client.Failed || r.Arrived(0)) {
				t.Errorf("%+v", r)
			}
			// The next sidecar has the file for itself.
			p.start()
			again := newGoClient(t, p.asRunning(), "again")
			ok(t, again.RegisterFile(t.Context(), "kv", "kv.bin", 0, 0, toEveryone()))
			b, err = again.Read("", "kv", client.Options{}, again.at(0, lentBytes))
			if r := ended(t, b, err); r.Status != client.OK || !bytes.Equal(again.mem.Bytes(), now) {
				t.Errorf("%+v, or other bytes", r)
			}
		})
	}
}
