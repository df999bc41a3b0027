// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/ui/ask"
	"github.com/kvspray/kvspray/internal/ui/command"
	"github.com/kvspray/kvspray/internal/ui/top"
	"github.com/kvspray/kvspray/internal/ui/usage"
)

func topCommand() *cobra.Command {
	var addr string
	var once, asJSON bool
	var interval time.Duration
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Watch a running sidecar: rails, transfers, peers, leases",
		Long: `Shows the state of a sidecar repeatedly: each rail pair with its state, its current and
learned rates, the bytes in flight, errors, and the reason for an exclusion; the peers; the open
leases. It reads the sidecar's HTTP address (http.listen) and needs no other access.

--once prints plain text once, for scripts; so does a standard output that is not a terminal.
--output json prints once, too: counters are totals, without rates.`,
		Example: `  kvspray top
  kvspray top --http 127.0.0.1:7661 --interval 500ms
  kvspray top --once | grep excluded
  kvspray top --output json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if interval < top.MinInterval || interval > top.MaxInterval {
				return usage.Of(fmt.Errorf("--interval %v: must be %v to %v", interval, top.MinInterval,
					top.MaxInterval))
			}
			addr, err := ask.Address(addr)
			if err != nil {
				return usage.Of(err)
			}
			if asJSON {
				return top.OnceJSON(cmd.Context(), addr, cmd.OutOrStdout())
			}
			if once || !terminal(cmd.OutOrStdout()) {
				return top.Once(cmd.Context(), addr, interval, cmd.OutOrStdout())
			}
			return top.Live(cmd.Context(), addr, interval, cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&addr, "http", fmt.Sprintf("127.0.0.1:%d", config.DefaultHTTPPort),
		"host:port of the sidecar's http.listen")
	cmd.Flags().BoolVar(&once, "once", false, "print once, as plain text")
	command.OutputFlag(cmd, &asJSON)
	cmd.Flags().DurationVar(&interval, "interval", time.Second, "time between two updates; rates "+
		"are over one")
	return cmd
}

// terminal reports whether w is a terminal.
func terminal(w any) bool {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return false
	}
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0 && f.Name() != os.DevNull
}
