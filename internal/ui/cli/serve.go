package cli

import (
	"context"
	"errors"
	"log/slog"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/internal/version"
	"github.com/kvspray/kvspray/sidecar"
)

func serveCommand() *cobra.Command {
	var flags configFlags
	var ready, level string
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the sidecar",
		Long: `Runs the sidecar of this node: engines connect to its unix socket, other sidecars to its
peer address.

Without a file and flags it binds to loopback only. Addresses off loopback need a cluster key or
certificates ('kvspray keygen').
SIGTERM drains: no new leases, open leases continue for at most drain.timeout. A second signal ends
the process at once.`,
		Example: `  kvspray serve
  kvspray serve --socket /run/a.sock --listen 127.0.0.1:0 --http 127.0.0.1:0 --set peer.gossip.listen=off
  kvspray serve --config /etc/kvspray.yaml`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("log-level") {
				if err := new(slog.Level).UnmarshalText([]byte(level)); err != nil {
					return usage.Errorf("--log-level %q is not debug, info, warn or error", level)
				}
				flags.sets = append(flags.sets, "log.level="+level)
			}
			cfg, err := flags.load()
			if err != nil {
				return err
			}
			if err := checkFiles(cfg); err != nil {
				return err
			}
			if err := readyFile(ready); err != nil {
				return err
			}
			log, flush := openLog(cmd.ErrOrStderr(), cfg.Log.Severity(), cfg.Log.Format)
			defer flush()
			node, err := sidecar.New(sidecar.Options{Config: cfg, Log: log,
				Registry: newRegistry(), Version: version.String()})
			if err != nil {
				return err
			}
			return runNode(cmd.Context(), node, cfg.Engine.Socket, ready)
		},
	}
	flags.add(cmd)
	cmd.Flags().StringVar(&level, "log-level", "",
		"debug, info, warn or error; short for --set log.level=")
	cmd.Flags().StringVar(&ready, "ready-file", "", "file for the bound addresses as JSON, written "+
		"once serving; for scripts that use port 0")
	return cmd
}

// newRegistry has the metrics of every program: process, runtime and version.
func newRegistry() *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		metrics.Build(version.String()))
	return reg
}

// runNode runs the node and writes its addresses as soon as they are known.
func runNode(ctx context.Context, node *sidecar.Node, socket, ready string) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	var readyErr error
	wg.Go(func() {
		<-node.Started()
		if node.Endpoint() == "" {
			return // Run failed and returns the reason
		}
		addrs := map[string]string{"peer": node.Endpoint(), "http": node.HTTPAddr(), "socket": socket}
		if readyErr = writeReady(ready, addrs); readyErr != nil {
			stop()
		}
	})
	err := node.Run(ctx)
	wg.Wait()
	return errors.Join(err, readyErr)
}
