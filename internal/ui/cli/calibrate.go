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
		Short: "Measure this host's GPUs under load, for its sidecars",
		Long: `Measures each GPU model of this host while a stream of kernels keeps it busy: the thread
blocks that the pack and unpack kernels need, the piece size from which copy engines are faster than
packing, and the bytes from which a copy with the host is faster over the PCIe links of all GPUs.
Writes the results to the file of transports.gpu.calibration for serve. Takes some seconds, during
which engines on these GPUs are slower.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := flags.load()
			if err != nil {
				return err
			}
			if err := checkParent("out", out); err != nil {
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
	cmd.Flags().StringVar(&out, "out", "", "file to write; default: the file of "+
		"transports.gpu.calibration")
	return cmd
}
