package ping

import (
	"context"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// mtu is the MTU of the path to an endpoint as the kernel has it: of the route, less if a router
// reported so. A connected datagram socket sends nothing. 0: not known.
func mtu(ctx context.Context, endpoint string) int {
	var d net.Dialer
	c, err := d.DialContext(ctx, "udp", endpoint)
	if err != nil {
		return 0
	}
	defer c.Close()
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		return 0
	}
	level, option := unix.IPPROTO_IP, unix.IP_MTU
	if c.RemoteAddr().(*net.UDPAddr).IP.To4() == nil {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_MTU
	}
	value := 0
	err = raw.Control(func(fd uintptr) {
		if v, err := unix.GetsockoptInt(int(fd), level, option); err == nil {
			value = v
		}
	})
	if err != nil {
		return 0
	}
	return value
}
