package railsbench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvspray/kvspray/lab/railsbench/netrig"
	"github.com/kvspray/kvspray/lab/timeline"
)

// Plain streams.
const (
	streamPiece = 256 << 10 // bytes of one call
	streamWarm  = 700 * time.Millisecond
)

// Streams measures what one plain stream over each of these rails carries, all of them at once, in
// bytes that were read.
func Streams(ctx context.Context, rig *netrig.Rig, rails []int,
	span time.Duration) (_ []timeline.Rate, err error) {
	ctx, cancel := context.WithTimeout(ctx, streamWarm+span+10*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			_ = c.Close()
		}
		wg.Wait()
	}()
	read := make([]atomic.Uint64, len(rails))
	for k, i := range rails {
		l, err := rig.Listen(ctx, netrig.Receiver, netip.AddrPortFrom(netrig.Addr(netrig.Receiver, i),
			0).String())
		if err != nil {
			return nil, fmt.Errorf("plain stream: %w", err)
		}
		out, err := rig.Dial(ctx, netrig.Sender, netrig.Addr(netrig.Sender, i), l.Addr().String())
		if err != nil {
			return nil, errors.Join(fmt.Errorf("plain stream: %w", err), l.Close())
		}
		conns = append(conns, out)
		in, err := l.Accept()
		_ = l.Close()
		if err != nil {
			return nil, fmt.Errorf("plain stream: %w", err)
		}
		conns = append(conns, in)
		wg.Go(func() {
			b := make([]byte, streamPiece)
			for {
				if _, err := out.Write(b); err != nil {
					return // closed
				}
			}
		})
		wg.Go(func() {
			b := make([]byte, streamPiece)
			for {
				n, err := in.Read(b)
				if err != nil {
					return // closed
				}
				read[k].Add(uint64(n))
			}
		})
	}
	if err := pause(ctx, streamWarm); err != nil {
		return nil, err
	}
	from, begin := make([]uint64, len(rails)), time.Now()
	for k := range read {
		from[k] = read[k].Load()
	}
	if err := pause(ctx, span); err != nil {
		return nil, err
	}
	took := time.Since(begin)
	rates := make([]timeline.Rate, len(rails))
	for k := range read {
		rates[k] = timeline.RateOf(read[k].Load()-from[k], took)
	}
	return rates, nil
}

// Together measures what plain streams over all rails at once carry.
func Together(ctx context.Context, rig *netrig.Rig, span time.Duration) (sum timeline.Rate,
	err error) {
	var all []int
	for i := range rig.Rails() {
		all = append(all, i)
	}
	rates, err := Streams(ctx, rig, all, span)
	for _, r := range rates {
		sum += r
	}
	return sum, err
}

// pause waits, unless ctx ends first.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
