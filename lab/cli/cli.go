// Package cli holds the commands of the kvspray-bench binary: each benchmark compares data movement
// with a plain baseline of the same run. The product links nothing of it. No goroutines.
package cli

import (
	"io"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/ui/command"
	"github.com/kvspray/kvspray/lab/copybench"
	"github.com/kvspray/kvspray/lab/gpubench"
	"github.com/kvspray/kvspray/lab/peers"
	"github.com/kvspray/kvspray/lab/placebench"
	"github.com/kvspray/kvspray/lab/railsbench"
	"github.com/kvspray/kvspray/lab/rdmabench"
	"github.com/kvspray/kvspray/lab/routebench"
	"github.com/kvspray/kvspray/lab/simbench"
)

// Main runs the command line and returns the exit code.
func Main(args []string, stdout, stderr io.Writer) int {
	return command.Run(newRoot(), args, stdout, stderr)
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "kvspray-bench",
		Short: "Measures data movement, beside a plain baseline of the same run",
		Long: `kvspray-bench measures data movement, beside a plain baseline of the same run.

Two processes of this host:                        kvspray-bench copy
Two sidecars over rails that fail (root):          kvspray-bench rails
The same in simulated time, up to 4096 nodes:      kvspray-bench sim
GPU memory:                                        kvspray-bench gpu
Routing policies on simulated clusters:            kvspray-bench place
Routers in front of engines that compute nothing:  kvspray-bench route
RDMA on real NICs:                                 kvspray-bench rdma
Other transfer engines over the same rails (root): kvspray-bench peers`,
	}
	root.AddCommand(copybench.NewCopyCommand(), gpubench.NewCommand(), peers.NewCommand(),
		placebench.NewCommand(), railsbench.NewCommand(), rdmabench.NewCommand(),
		routebench.NewCommand(), simbench.NewCommand())
	command.Finish(root)
	return root
}
