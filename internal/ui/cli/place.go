package cli

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/ui/command"
	"github.com/kvspray/kvspray/internal/ui/place"
	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/placement"
)

func placeCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "place",
		Short: "Predict which engines give a prompt's first token soonest",
		Args:  cobra.NoArgs, RunE: command.Help}
	cmd.AddCommand(placeExplainCommand(), placeCalibrateCommand(), placeRowsCommand())
	return cmd
}

func placeExplainCommand() *cobra.Command {
	var state, calibration string
	var tokens, limit int
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "explain",
		Short: "Print all choices for a prompt with their predicted times to the first token",
		Long: `Ranks all choices for one prompt by predicted time: run it on one engine with the tokens
that the engine has cached, fetch cached tokens from another engine or a store first, or compute on
a prefill engine for a decode engine. The state file (JSON) has engines, stores, hits and paths;
docs/placement.md describes it.`,
		Example: `  kvspray place explain --state state.json --tokens 32768
  kvspray place explain --state state.json --tokens 8000 --calibration calibration.json --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 0 {
				return usage.Errorf("--limit %d: want at least 0", limit)
			}
			cal, err := readCalibration(calibration)
			if err != nil {
				return err
			}
			b, err := readBounded("state", state)
			if err != nil {
				return err
			}
			c, err := placement.ParseFile(b, tokens, cal)
			if err != nil {
				return usage.Errorf("--state %s: %w", state, err)
			}
			return place.Explain(cmd.OutOrStdout(), c, limit, asJSON)
		},
	}
	f := cmd.Flags()
	f.StringVar(&state, "state", "", "state file, JSON")
	f.StringVar(&calibration, "calibration", "", "file that 'kvspray place calibrate' wrote, if the "+
		"state file names lines of it")
	f.IntVar(&tokens, "tokens", 8192, "tokens of the prompt")
	f.IntVar(&limit, "limit", 20, "choices to print, 0 for all")
	command.OutputFlag(cmd, &asJSON)
	return cmd
}

func placeCalibrateCommand() *cobra.Command {
	var samples, out string
	cmd := &cobra.Command{
		Use:   "calibrate",
		Short: "Fit fixed time and rate of links and prefills to measurements",
		Long: `Fits a fixed time and a rate to the measurements of each name, and writes them to the
calibration file. Each line of the samples is NAME AMOUNT SECONDS. The amount is bytes for a link
and tokens for a prefill. docs/placement.md describes how to measure.`,
		Example: "  kvspray place calibrate --samples samples.txt --out calibration.json",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if err := checkParent("out", out); err != nil {
				return err
			}
			b, err := readBounded("samples", samples)
			if err != nil {
				return err
			}
			list, err := placement.ParseSamples(b)
			if err != nil {
				return usage.Errorf("--samples %s: %w", samples, err)
			}
			c, err := placement.Calibrate(list)
			if err != nil {
				return usage.Errorf("--samples %s: %w", samples, err)
			}
			if out == "" {
				return place.Calibration(cmd.OutOrStdout(), c)
			}
			f, err := os.Create(out)
			if err != nil {
				return fmt.Errorf("--out: %w", err)
			}
			return errors.Join(place.Calibration(f, c), f.Close())
		},
	}
	cmd.Flags().StringVar(&samples, "samples", "", "file of measurements")
	cmd.Flags().StringVar(&out, "out", "", "file to write; default: standard output")
	return cmd
}

func placeRowsCommand() *cobra.Command {
	var calibration string
	var rows, tokens int
	cmd := &cobra.Command{
		Use:   "rows",
		Short: "Print what it would cost to move query rows to a cache",
		Long: `Prints a cost model of attention over the cache of another node (latent attention, 27
layers): query rows go to the cache and partial results come back. The parameters are built in;
their source is not recorded. No engine does this today.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if rows < 1 || tokens < 1 {
				return usage.Errorf("--rows %d --tokens %d: want at least 1 of each", rows, tokens)
			}
			fabrics := placement.PublishedFabrics()
			if calibration != "" {
				cal, err := readCalibration(calibration)
				if err != nil {
					return err
				}
				fabrics = cal.Fabrics
			}
			return place.Rows(cmd.OutOrStdout(), placement.MLA27(), fabrics, rows, tokens)
		},
	}
	cmd.Flags().StringVar(&calibration, "calibration", "", "file with measured fabrics (default: "+
		"built-in ones)")
	cmd.Flags().IntVar(&rows, "rows", 256, "query rows, one for each head of each token")
	cmd.Flags().IntVar(&tokens, "tokens", 2048, "tokens of the cache")
	return cmd
}

// readCalibration reads a calibration file; an empty path has none.
func readCalibration(path string) (*placement.Calibration, error) {
	if path == "" {
		return &placement.Calibration{}, nil
	}
	b, err := readBounded("calibration", path)
	if err != nil {
		return nil, err
	}
	c, err := placement.ParseCalibration(b)
	if err != nil {
		return nil, usage.Errorf("--calibration %s: %w", path, err)
	}
	return c, nil
}

// readBounded reads a file of at most placement.MaxFile bytes; larger ones are refused by their
// parser.
func readBounded(flag, path string) ([]byte, error) {
	if path == "" {
		return nil, usage.Errorf("--%s: missing: name a file", flag)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, usage.Errorf("--%s: %w: name a file", flag, err)
	}
	defer func() { _ = f.Close() }() // read only
	return io.ReadAll(io.LimitReader(f, placement.MaxFile+1))
}
