// SPDX-License-Identifier: Apache-2.0

package testutil

import (
	"net"
	"os"
)

// Loopback is an address of this host that no other process uses, because the process's number is in it. A port of it that a test gives
// up and takes again is still free then: others listen on their own address, and connections that leave for anywhere leave from 127.0.0.1.
func Loopback() string {
	const numbers = 1 << 22 // Linux gives no process a higher one
	pid := os.Getpid() % numbers
	return net.IPv4(127, byte(64+pid>>16), byte(pid>>8), byte(pid)).String()
}
