// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/top"
)

func topCommand() *cobra.Command {
	var addr string
	var once bool
	var interval time.Duration
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Watch a running sidecar: rails, transfers, peers, leases",
		Long: `Shows what a sidecar is doing, again and again: each pair of rails with its state, its rate of now and the learned one, what is in
flight, errors, and why it is out of use; the peers; the open leases. It asks the sidecar's HTTP address (http.listen) and needs no
other access.

--once prints plain text one time, for scripts; so does a standard output that is no terminal.`,
		Example: `  kvspray top
  kvspray top --http 127.0.0.1:7661 --interval 500ms
  kvspray top --once | grep excluded`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if interval < top.MinInterval || interval > top.MaxInterval {
				return usage(fmt.Errorf("--interval %v: must be %v to %v", interval, top.MinInterval, top.MaxInterval))
			}
			addr, err := top.Address(addr)
			if err != nil {
				return usage(err)
			}
			if once || !terminal(cmd.OutOrStdout()) {
				return top.Once(cmd.Context(), addr, interval, cmd.OutOrStdout())
			}
			return top.Live(cmd.Context(), addr, interval, cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&addr, "http", fmt.Sprintf("127.0.0.1:%d", config.DefaultHTTPPort), "host:port that the sidecar's http.listen names")
	cmd.Flags().BoolVar(&once, "once", false, "print one time, as plain text")
	cmd.Flags().DurationVar(&interval, "interval", time.Second, "between two looks; rates are over one")
	return cmd
}

// terminal reports whether w can be drawn on.
func terminal(w any) bool {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("TERM") == "dumb" {
		return false
	}
	st, err := f.Stat()
	return err == nil && st.Mode()&os.ModeCharDevice != 0 && f.Name() != os.DevNull
}
