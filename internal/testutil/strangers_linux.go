package testutil

import (
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// strangersTick is how often Strangers open connections.
const strangersTick = 5 * time.Millisecond

// Strangers hold connections to a listener on loopback open, and open some new ones a
// second, for which the oldest go, until the test is over or stop is called. They send payload on
// each, and nothing more. from gives the n-th one's source address. It returns once the first
// ones are open.
func Strangers(tb testing.TB, address string, hold, perSecond int, from func(n int) [4]byte,
	payload []byte) (stop func() (opened int)) {
	tb.Helper()
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		tb.Fatal(err)
	}
	// Both ends may be this process's, and a listener that is behind has more of them open than it
	// holds.
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		tb.Fatal(err)
	}
	if limit := int(min(files.Cur, 1<<20) / 3); hold > limit {
		tb.Logf("strangers hold %d connections and not %d: a process may have %d open files", limit,
			hold, files.Cur)
		hold = limit
	}
	to := &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	var held []int
	count := 0
	open := func() {
		// Raw sockets, because ten thousand of package net's would be most of the test's cost.
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			tb.Errorf("socket: %v", err)
			return
		}
		_ = unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
		// leaves no port behind
		_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		if err = unix.Bind(fd, &unix.SockaddrInet4{Addr: from(count)}); err == nil {
			err = unix.Connect(fd, to)
		}
		if err == nil && len(payload) > 0 {
			_, err = unix.SendmsgN(fd, payload, nil, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
			if err == syscall.EPIPE {
				err = nil // it was closed for another one
			}
		}
		count++
		if err != nil && err != syscall.ECONNRESET {
			tb.Errorf("connect: %v", err)
		}
		held = append(held, fd)
		if len(held) > hold {
			_ = unix.Close(held[0])
			held = held[1:]
		}
	}
	for range hold {
		open()
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		began, opened := time.Now(), 0
		for tick := time.NewTicker(strangersTick); ; {
			select {
			case <-done:
				tick.Stop()
				return
			case <-tick.C:
			}
			for due := int(time.Since(began).Seconds() * float64(perSecond)); opened < due; opened++ {
				open()
			}
		}
	})
	stop = sync.OnceValue(func() int {
		close(done)
		wg.Wait()
		for _, fd := range held {
			_ = unix.Close(fd)
		}
		return count
	})
	tb.Cleanup(func() { stop() })
	return stop
}

// OneStranger and ManyStrangers are sources for Strangers.
func OneStranger(int) [4]byte { return [4]byte{127, 0, 0, 1} }

// ManyStrangers returns a separate address for each of the first 65,536 connections.
func ManyStrangers(n int) [4]byte { return [4]byte(net.IPv4(127, 9, byte(n>>8), byte(n)).To4()) }
