// Command kvspray is the sidecar, the router and their tools in one binary.
package main

import (
	"os"

	"github.com/kvspray/kvspray/internal/ui/cli"
)

func main() { os.Exit(cli.Main(os.Args[1:], os.Stdout, os.Stderr)) }
