// SPDX-License-Identifier: Apache-2.0

// Command redis is a Redis server for tests of programs. It listens at its argument until its
// standard input ends.
package main

import (
	"fmt"
	"io"
	"os"

	"github.com/alicebob/miniredis/v2"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: redis HOST:PORT")
		os.Exit(2)
	}
	s := miniredis.NewMiniRedis()
	if err := s.StartAddr(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "redis:", err)
		os.Exit(1)
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	s.Close()
}
