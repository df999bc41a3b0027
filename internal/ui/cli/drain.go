// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"net/url"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/ui/ask"
	"github.com/kvspray/kvspray/internal/ui/drain"
	"github.com/kvspray/kvspray/internal/ui/usage"
)

func drainCommand() *cobra.Command {
	var o drain.Options
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "drain",
		Short: "Take an engine out of service: no new requests, and wait until it is idle",
		Long: `Makes routers that know this sidecar (--prefill-sidecar, --decode-sidecar) send no new
requests to its engine, and waits until the engine has answered those that it has. Transfers go on.
Run it before the engine gets SIGTERM, for instance as the preStop hook of a pod, on the sidecar's
host or in its pod. The exit status is 1 if requests are left after --timeout.`,
		Example: `  kvspray drain --engine http://127.0.0.1:8100
  kvspray drain --undo`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, err := ask.Address(o.HTTP); err != nil {
				return usage.Of(err)
			}
			if u, err := url.Parse(o.Engine); o.Engine != "" && (err != nil || u.Host == "" ||
				u.Scheme != "http" && u.Scheme != "https") {
				return usage.Errorf("--engine %q is not a URL; write for instance http://127.0.0.1:8100",
					o.Engine)
			}
			if o.Notice < 0 || timeout <= o.Notice {
				return usage.Errorf("--notice %v, --timeout %v: want 0 or more, and a longer timeout",
					o.Notice, timeout)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return drain.Run(ctx, o)
		},
	}
	cmd.Flags().StringVar(&o.HTTP, "http", fmt.Sprintf("127.0.0.1:%d", config.DefaultHTTPPort),
		"host:port of the sidecar's http.listen")
	cmd.Flags().StringVar(&o.Engine, "engine", "", "URL of the engine's API server, to wait until it "+
		"is idle (vLLM, SGLang with --enable-metrics)")
	cmd.Flags().DurationVar(&o.Notice, "notice", 5*time.Second, "time in which routers see that the "+
		"engine leaves")
	cmd.Flags().DurationVar(&timeout, "timeout", time.Minute, "longest wait, with --notice")
	cmd.Flags().BoolVar(&o.Undo, "undo", false, "let routers send requests again")
	return cmd
}
