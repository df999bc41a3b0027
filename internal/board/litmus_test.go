package board_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvspray/kvspray/internal/board"
	"github.com/kvspray/kvspray/internal/testutil"
)

func mix(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	return x
}

// size is the same as size_of in testdata/litmus.c: mostly small, now and then near half the
// smallest ring.
func size(seq uint64) int {
	r := mix(seq)
	if r%61 == 0 {
		return int((r >> 8) % 30000)
	}
	return int((r >> 8) % 200)
}

func fill(buf []byte, seq uint64) []byte {
	buf = buf[:size(seq)]
	for i := range buf {
		buf[i] = byte(seq*131 + uint64(i)*7)
	}
	return buf
}

func check(rec board.Record, seq uint64) error {
	if rec.Seq != seq || rec.Lease != 3*seq || rec.Epoch != seq>>4 || rec.Status != uint16(seq) ||
		len(rec.Body) != size(seq) {
		return fmt.Errorf("record %d: seq %d, lease %d, epoch %d, status %d, %d bytes", seq, rec.Seq,
			rec.Lease, rec.Epoch, rec.Status, len(rec.Body))
	}
	for i, b := range rec.Body {
		if b != byte(seq*131+uint64(i)*7) {
			return fmt.Errorf("record %d: byte %d is %#x", seq, i, b)
		}
	}
	return nil
}

func eventfd(t testing.TB) *os.File {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "eventfd")
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func ring(f *os.File) error {
	_, err := f.Write(binary.NativeEndian.AppendUint64(nil, 1))
	return err
}

// pipe sends n records through sub and expects each back on comp, with eventfds both ways.
func pipe(n uint64, sub *board.Producer, comp *board.Consumer, door, bell *os.File) error {
	moved := make(chan struct{}, 1) // something came back: there may be room again
	failed := make(chan error, 1)
	stop := make(chan struct{})
	go func() {
		buf := make([]byte, 0, 30000)
		for seq := uint64(1); seq <= n; {
			wake, err := sub.Push(board.RecStep, 0, 3*seq, seq>>4, fill(buf, seq))
			if errors.Is(err, board.ErrFull) {
				select {
				case <-moved:
				case <-stop:
					failed <- nil
					return
				}
				continue
			}
			if err == nil && wake {
				err = ring(door)
			}
			if err != nil {
				failed <- err
				return
			}
			seq++
		}
		failed <- nil
	}()
	err := func() error {
		var count [8]byte
		for seq := uint64(1); seq <= n; {
			rec, ok, err := comp.Next()
			if err != nil {
				return err
			}
			if ok {
				if err := check(rec, seq); err != nil {
					return err
				}
				seq++
				select {
				case moved <- struct{}{}:
				default:
				}
				continue
			}
			if !comp.Sleep() {
				continue
			}
			// a lost bell shows as this time-out
			_ = bell.SetReadDeadline(time.Now().Add(time.Minute))
			if _, err := bell.Read(count[:]); err != nil {
				return fmt.Errorf("bell after %d records: %w", seq-1, err)
			}
		}
		return nil
	}()
	close(stop)
	return errors.Join(err, <-failed)
}

// TestLitmus runs our ring code against the shim's across two processes.
func TestLitmus(t *testing.T) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		testutil.Skip(t, "gcc", "gcc is not installed: "+err.Error())
	}
	const root = "../../pybind/"
	bin := filepath.Join(t.TempDir(), "litmus")
	if out, err := exec.Command(gcc, "-std=gnu11", "-O2", "-Wall", "-I", root+"include/kvspray", "-I",
		root+"include", "-I", root+"src", "-o", bin,
		"testdata/litmus.c", root+"src/ring.c").CombinedOutput(); err != nil {
		t.Fatalf("compile: %v\n%s", err, out)
	}
	n := uint64(400_000)
	if testing.Short() {
		n = 50_000
	}
	fd, err := unix.MemfdCreate("rings", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "rings")
	defer file.Close()
	bytes := board.RingsBytes(board.RingMinBytes, board.RingMinBytes)
	if err := file.Truncate(int64(bytes)); err != nil {
		t.Fatal(err)
	}
	mem, err := unix.Mmap(fd, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mem) }()
	rings, err := board.InitRings(mem, [16]byte{1}, board.RingMinBytes, board.RingMinBytes)
	if err != nil {
		t.Fatal(err)
	}
	door, bell := eventfd(t), eventfd(t)
	cmd := exec.Command(bin, strconv.FormatUint(n, 10))
	cmd.Stderr = os.Stderr
	// Fd() takes a file out of the netpoller, and the child shares the descriptions: hand it
	// duplicates.
	for _, f := range []*os.File{file, door, bell} {
		rc, err := f.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var dup int
		if err := rc.Control(func(fd uintptr) {
			dup, _ = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 3)
		}); err != nil {
			t.Fatal(err)
		}
		d := os.NewFile(uintptr(dup), f.Name())
		defer d.Close()
		cmd.ExtraFiles = append(cmd.ExtraFiles, d)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	err = pipe(n, rings.SubmissionProducer(), rings.CompletionConsumer(), door, bell)
	if err != nil {
		_ = cmd.Process.Kill()
	}
	if err := errors.Join(err, cmd.Wait()); err != nil {
		t.Fatal(err)
	}
}

// TestHeap is the same on heap memory, where the race detector sees every byte.
func TestHeap(t *testing.T) {
	n := uint64(60_000)
	if testing.Short() {
		n = 10_000
	}
	rings, err := board.InitRings(make([]byte, board.RingsBytes(board.RingMinBytes,
		board.RingMinBytes)), [16]byte{1}, board.RingMinBytes, board.RingMinBytes)
	if err != nil {
		t.Fatal(err)
	}
	door, bell := eventfd(t), eventfd(t)
	echo := make(chan error, 1)
	go func() {
		sub, comp := rings.SubmissionConsumer(), rings.CompletionProducer()
		var count [8]byte
		for seq := uint64(1); seq <= n; {
			rec, ok, err := sub.Next()
			if err != nil {
				echo <- err
				return
			}
			if !ok {
				if sub.Sleep() {
					_ = door.SetReadDeadline(time.Now().Add(time.Minute))
					if _, err := door.Read(count[:]); err != nil {
						echo <- err
						return
					}
				}
				continue
			}
			for {
				wake, err := comp.Push(rec.Type, uint16(seq), rec.Lease, rec.Epoch, rec.Body)
				if err == nil {
					if wake {
						err = ring(bell)
					}
					if err == nil {
						break
					}
				}
				if !errors.Is(err, board.ErrFull) {
					echo <- err
					return
				}
			}
			seq++
		}
		echo <- nil
	}()
	if err := errors.Join(pipe(n, rings.SubmissionProducer(), rings.CompletionConsumer(), door, bell),
		<-echo); err != nil {
		t.Fatal(err)
	}
}
