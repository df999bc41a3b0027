package copybench

import (
	"io"
	"syscall"

	"golang.org/x/sys/unix"
)

// plainBytes is the contiguous buffer of the tcp baseline.
const plainBytes = 256 << 10

// share is connection i's part of the bytes, cut at buffers.
func share(total, conns, i int) (from, to int) {
	n := (total + plainBytes - 1) / plainBytes
	return min(n*i/conns*plainBytes, total), min(n*(i+1)/conns*plainBytes, total)
}

// vector is a plain writev or readv of one buffer through the netpoller, with nothing around it.
type vector struct {
	raw   syscall.RawConn
	write bool
	iov   [][]byte
	n     int
	err   error
	fn    func(fd uintptr) bool
}

func newVector(raw syscall.RawConn, write bool) *vector {
	v := &vector{raw: raw, write: write, iov: make([][]byte, 1)}
	v.fn = func(fd uintptr) bool {
		if v.write {
			v.n, v.err = unix.Writev(int(fd), v.iov)
		} else {
			v.n, v.err = unix.Readv(int(fd), v.iov)
		}
		return v.err != unix.EAGAIN
	}
	return v
}

// all moves the whole buffer.
func (v *vector) all(p []byte) error {
	for len(p) > 0 {
		v.iov[0] = p
		err := error(nil)
		if v.write {
			err = v.raw.Write(v.fn)
		} else {
			err = v.raw.Read(v.fn)
		}
		switch {
		case err != nil:
			return err
		case v.err == unix.EINTR:
			continue
		case v.err != nil:
			return v.err
		case v.n == 0:
			return io.ErrUnexpectedEOF
		}
		p = p[v.n:]
	}
	return nil
}
