// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/sidecar"
)

func calibrateCommand() *cobra.Command {
	var flags configFlags
	var out string
	cmd := &cobra.Command{
		Use:   "calibrate",
		Short: "Measure this host's GPUs under load, for the sidecars that serve here",
		Long: `Measures, for each model of GPU that this host has, while a stream of kernels keeps it busy: how many thread blocks the kernels need that
pack and unpack, from what size of pieces on copy engines are quicker than packing, and from how many bytes on a copy with the host pays over
the PCIe links of all GPUs. Writes it to the file that transports.gpu.table names, where serve finds it. Takes some seconds, in which
engines on these GPUs are slower.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := flags.load()
			if err != nil {
				return err
			}
			if err := inFolder("out", out); err != nil {
				return err
			}
			log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
			path, table, err := sidecar.CalibrateGPUs(cmd.Context(), c, out, log)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s\n%s\n", path, table)
			return err
		},
	}
	flags.add(cmd)
	cmd.Flags().StringVar(&out, "out", "", "file to write; where not given, that of transports.gpu.table")
	return cmd
}
