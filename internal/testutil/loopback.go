package testutil

import (
	"net"
	"os"
)

// Loopback is an address of this host that no other process uses, because it contains the process's
// number. A port that a test releases and binds again is therefore still free: others listen on
// their own address, and outgoing connections leave from 127.0.0.1.
func Loopback() string {
	const numbers = 1 << 22 // Linux has no higher process number
	pid := os.Getpid() % numbers
	return net.IPv4(127, byte(64+pid>>16), byte(pid>>8), byte(pid)).String()
}
