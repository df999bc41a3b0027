// Command kvspray-bench measures kvspray: copies, rails, simulated rails, GPUs, other engines.
package main

import (
	"os"

	"github.com/kvspray/kvspray/lab/cli"
)

func main() { os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr)) }
