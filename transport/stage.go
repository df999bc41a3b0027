package transport

import (
	"errors"
	"fmt"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/transfer"
)

// A backend that cannot reach memory itself moves slices of it through buffers in host memory:
// Gather at the source, LandFrom at the destination. Both use space for the slice's blocks.

var (
	errClosed = errors.New("the source lease was closed")
	errUneven = errors.New("the chunks of a slice do not add up to the bytes of the slice")
)

// Gather reads chunks r of the origin's memory into buf, which has their length, under the guard.
func (o *Origin) Gather(buf []byte, r transfer.Range, space *[]mem.Block) (transfer.Reason, error) {
	if !o.Enter() {
		return transfer.ReasonSourceGone, errClosed
	}
	defer o.Leave()
	if err := resolve(o.Memory, r, len(buf), space); err != nil {
		return transfer.ReasonRange, err
	}
	if err := mem.Gather(buf, *space); err != nil {
		return transfer.ReasonMemory, fmt.Errorf("read source: %w", err)
	}
	return transfer.ReasonNone, nil
}

// LandFrom writes the claimed chunks from buf, except those that have landed from another attempt,
// and lands the claim. It writes under the guard, so a fence waits for each of its copies.
func (c *Claim) LandFrom(buf []byte, lane Lane, space *[]mem.Block) (transfer.Reason, error) {
	for rest := c.r; rest.Count > 0; {
		count, fresh := c.Fresh(rest)
		r := transfer.Range{First: rest.First, Count: count}
		n, err := c.g.Memory.Bytes(r)
		if err != nil || n > uint64(len(buf)) {
			return transfer.ReasonRange, nil
		}
		if fresh {
			if resolve(c.g.Memory, r, int(n), space) != nil {
				return transfer.ReasonRange, nil
			}
			if why := c.Enter(); why != transfer.ReasonNone {
				return why, nil
			}
			err = mem.Scatter(*space, buf[:n])
			c.Leave()
			if err != nil {
				return transfer.ReasonMemory, err
			}
		}
		buf = buf[n:]
		rest.First, rest.Count = rest.First+count, rest.Count-count
	}
	return c.Land(lane), nil
}

// resolve finds the memory of chunks r, which must have n bytes.
func resolve(m Memory, r transfer.Range, n int, space *[]mem.Block) (err error) {
	if *space, err = m.Resolve((*space)[:0], r); err != nil {
		return err
	}
	var sum uint64
	for i := range *space {
		sum += (*space)[i].Len
	}
	if sum != uint64(n) {
		return errUneven
	}
	return nil
}
