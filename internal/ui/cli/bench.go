// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/bench/copybench"
	"github.com/kvspray/kvspray/bench/gpubench"
	"github.com/kvspray/kvspray/bench/railsbench"
	"github.com/kvspray/kvspray/bench/simbench"
)

func benchCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "bench", Short: "Measure data movement, beside a plain baseline of the same run", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(copybench.NewCopyCommand(), gpubench.NewCommand(), railsbench.NewCommand(), simbench.NewCommand())
	return cmd
}
