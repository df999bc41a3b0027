// Package rdmabench is `kvspray-bench rdma`: the test of `kvspray doctor --rdma` with more rounds
// of revocation and longer measurements, for a report about a NIC. No goroutines of its own.
package rdmabench

import (
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/ui/rdmacheck"
)

// NewCommand returns the `rdma` command.
func NewCommand() *cobra.Command {
	p := rdmacheck.Program{Config: config.Default()}
	c := &cobra.Command{
		Use:   "rdma [PEER]",
		Short: "RDMA on real NICs beside ib_write_bw, with revocation under traffic",
		Long: `Tests RDMA on each rail as 'kvspray doctor --rdma' does, longer: in loopback, or to a PEER
on which 'kvspray-bench rdma --serve HOST' runs. If both hosts have the package perftest, the report
also has each rate of ib_write_bw. A write that comes after a revocation has ended is a fault of the
NIC, which the report names.`,
		Example: `  kvspray-bench rdma --report rdma.json
  kvspray-bench rdma --cluster-key k --serve 10.0.0.6        # there
  kvspray-bench rdma --cluster-key k 10.0.0.6 --rounds 1000   # here`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			p.Peer = ""
			if len(args) > 0 {
				p.Peer = args[0]
			}
			p.Config.Transports.GDR.Rails = p.Rails
			p.Options.Rails = nil // the configuration has them, with index
			p.Stdout, p.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
			return p.Run(cmd.Context())
		},
	}
	f := c.Flags()
	f.IntVar(&p.Rounds, "rounds", 100, "revocations under traffic on each rail")
	f.DurationVar(&p.Span, "span", 5*time.Second, "time of each measurement of the rate")
	f.StringSliceVar(&p.Rails, "rails", nil,
		"ports, as transports.gdr.rails names them (default: every active one)")
	f.StringVar(&p.ServeAt, "serve", "",
		"serve tests of others at HOST[:PORT], until the command is ended")
	f.StringVar(&p.Report, "report", "", "a new file for the report as JSON")
	f.StringVar(&p.Config.Peer.ClusterKeyFile, "cluster-key", "", "file of the cluster key, of which "+
		"both ends off this host have a copy")
	f.BoolVar(&p.JSON, "json", false, "print JSON instead of the page")
	return c
}
