package trace

import (
	"bufio"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// Transfers continue while nothing reads their lines: the first line waits for the file, and no
// other.
func TestFileThatStalls(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	reader, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reader.Close() }()
	var l Lines
	if err := l.Open("trace.transfers", path, slog.New(slog.DiscardHandler)); err != nil {
		t.Fatal(err)
	}
	const sent = 2000 // more than a pipe holds
	waited := 0
	for i := range sent {
		start := time.Now()
		l.Put(Transfer{Side: "source", Bytes: uint64(i)})
		if time.Since(start) >= patience {
			waited++
		}
	}
	// A busy machine delays some of them.
	if waited == 0 || waited > sent/10 {
		t.Errorf("%d of %d lines waited", waited, sent)
	}
	scanner := bufio.NewScanner(reader)
	for i := range sent {
		if !scanner.Scan() {
			t.Fatalf("%d of %d lines: %v", i, sent, scanner.Err())
		}
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}
