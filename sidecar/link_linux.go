package sidecar

import (
	"bufio"
	"io"

	"golang.org/x/sys/unix"
)

// frameBuffer is what one read of a control lane may take, in bytes.
const frameBuffer = 32 << 10

func newFrameReader(r io.Reader) io.Reader { return bufio.NewReaderSize(r, frameBuffer) }

// writeOnce writes what fits into a non-blocking socket.
func writeOnce(fd int, b []byte) int {
	n, err := unix.Write(fd, b)
	if err != nil {
		return 0
	}
	return n
}
