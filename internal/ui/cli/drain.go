package cli

import (
	"net/url"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/redact"
	"github.com/kvspray/kvspray/internal/ui/drain"
	"github.com/kvspray/kvspray/internal/ui/usage"
)

func drainCommand() *cobra.Command {
	var o drain.Options
	var socket string
	cmd := &cobra.Command{
		Use:   "drain",
		Short: "Take an engine out of service: no new requests, and wait until it is idle",
		Long: `Makes routers whose engines name this sidecar send no new requests to its engine, and
waits until the engine has answered those that it has, and until their blocks are fetched. Transfers
go on. Run it before the engine gets SIGTERM, for instance as the
preStop hook of a pod, on the sidecar's host or in its pod, as root, as the sidecar's user or as one
of engine.admin_uids. The exit status is 1 if the engine is not known to be idle after --timeout.

Routers send requests again 30 s after the end of this command, or as soon as another engine
registers at the sidecar. --undo is for those who do not want to wait.`,
		Example: `  kvspray drain --engine http://127.0.0.1:8100
  kvspray drain --undo`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if o.Admin, err = adminSocket(socket); err != nil {
				return err
			}
			if u, err := url.Parse(o.Engine); o.Engine != "" && (err != nil || u.Host == "" ||
				u.Scheme != "http" && u.Scheme != "https") {
				return usage.Errorf("--engine %q is not a URL; write for instance http://127.0.0.1:8100",
					redact.URL(o.Engine))
			}
			if o.Notice < 0 || o.Timeout < o.Notice {
				return usage.Errorf("--notice %v, --timeout %v: want 0 or more, and no shorter timeout",
					o.Notice, o.Timeout)
			}
			return drain.Run(cmd.Context(), o)
		},
	}
	socketFlag(cmd, &socket)
	cmd.Flags().StringVar(&o.Engine, "engine", "", "URL of the engine's API server, to wait until it "+
		"is idle (vLLM, SGLang with --enable-metrics)")
	cmd.Flags().DurationVar(&o.Notice, "notice", 5*time.Second, "time in which routers see that the "+
		"engine leaves")
	cmd.Flags().DurationVar(&o.Timeout, "timeout", time.Minute, "longest wait, with --notice")
	cmd.Flags().BoolVar(&o.Ended, "ended-is-idle", false, "an engine that refuses connections, or "+
		"whose host has no address, has ended: for workers, whose leader ends before them")
	cmd.Flags().BoolVar(&o.Undo, "undo", false, "let routers send requests again at once")
	return cmd
}
