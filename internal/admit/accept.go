package admit

import (
	"errors"
	"iter"
	"net"
	"time"
)

// acceptPause follows an error of a listener. Without it missing descriptors would keep Accepted
// busy.
const acceptPause = 10 * time.Millisecond

// Accepted are the connections that a listener accepts, until it is closed or done is. Any other
// error ends nothing: the process is out of descriptors, or a connection went away before it was
// accepted. It is passed to failed.
func Accepted[C net.Conn](
	done <-chan struct{}, accept func() (C, error), failed func(error),
) iter.Seq[C] {
	return func(yield func(C) bool) {
		for {
			c, err := accept()
			switch {
			case errors.Is(err, net.ErrClosed):
				return
			case err == nil:
				if !yield(c) {
					return
				}
			default:
				failed(err)
				select {
				case <-time.After(acceptPause):
				case <-done:
					return
				}
			}
		}
	}
}
