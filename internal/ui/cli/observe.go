package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/ui/ask"
	"github.com/kvspray/kvspray/internal/ui/bugreport"
	"github.com/kvspray/kvspray/internal/ui/command"
	"github.com/kvspray/kvspray/internal/ui/ping"
	"github.com/kvspray/kvspray/internal/ui/status"
	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/internal/ui/why"
)

func statusCommand() *cobra.Command {
	var addr string
	var asJSON, watch bool
	var interval time.Duration
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show a running sidecar on one screen: engines, transfers, rails, store, problems",
		Long: `Prints the state of a running sidecar on one screen: engines, transfers, each peer with its
lanes, each rail pair with its state, its learned rate and errors, open leases, the page store, and
problems. It reads the sidecar's HTTP address (http.listen) and needs no other access.

--watch prints the state again at each --interval until Ctrl-C, with the rates since the print
before: on a terminal in place, elsewhere one after another.`,
		Example: `  kvspray status
  kvspray status --http 127.0.0.1:7661 --output json
  kvspray status --watch --interval 500ms`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case interval < status.MinInterval || interval > status.MaxInterval:
				return usage.Errorf("--interval %v: must be %v to %v", interval, status.MinInterval,
					status.MaxInterval)
			case cmd.Flags().Changed("interval") && !watch:
				return usage.Errorf("--interval without --watch: add --watch")
			case watch && asJSON:
				return usage.Errorf("--watch prints text only: leave out --watch or --output json")
			}
			addr, err := ask.Address(addr)
			if err != nil {
				return usage.Of(err)
			}
			if watch {
				return status.Watch(cmd.Context(), addr, interval, cmd.OutOrStdout())
			}
			s, err := status.Read(cmd.Context(), addr)
			if err != nil {
				return err
			}
			if asJSON {
				return s.WriteJSON(cmd.OutOrStdout())
			}
			_, err = io.WriteString(cmd.OutOrStdout(), s.Text(nil))
			return err
		},
	}
	cmd.Flags().StringVar(&addr, "http", fmt.Sprintf("127.0.0.1:%d", config.DefaultHTTPPort),
		"host:port of the sidecar's http.listen")
	cmd.Flags().BoolVar(&watch, "watch", false, "print again and again, with rates, until Ctrl-C")
	cmd.Flags().DurationVar(&interval, "interval", time.Second, "time between two prints of --watch")
	command.OutputFlag(cmd, &asJSON)
	return cmd
}

func whyCommand() *cobra.Command {
	var addrs []string
	var router string
	var asJSON bool
	local := fmt.Sprintf("127.0.0.1:%d", config.DefaultHTTPPort)
	cmd := &cobra.Command{
		Use:   "why ID",
		Short: "Explain one request: engines, transports and rails with bytes, waits, outcome",
		Long: `Prints what a sidecar has about one request: its engine, its waits, the bytes of each
rail, why each transport was used or not, and the outcome. ID is the engine's id of the request,
as in logs and answers (cmpl-...), its X-Request-Id, the beginning of either, or the first 8 or more
digits of the xfer of a log line. A sidecar keeps records of its last transfers, copies, gets and
puts: 512 that ended well, and 512 that did not.

--http names a sidecar, and can be repeated: the peer's sidecar has the other part of a transfer.
--router asks 'kvspray proxy' for the engines that it chose, and then asks their sidecars. The
router needs the whole X-Request-Id, or an engine's id that contains it. Parts that the command
cannot get are printed as unknown. The exit status is 1 if there is no record of the request.`,
		Example: `  kvspray why cmpl-4be2c7
  kvspray why 4be2c7 --router http://127.0.0.1:8000 --output json
  kvspray why 4be2c7 --http 127.0.0.1:7651 --http 10.0.0.2:7651`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			o := why.Options{ID: args[0], Router: router}
			if o.ID == "" || len(o.ID) > nodeapi.MaxRequestID {
				return usage.Errorf("why: ID %.20q has %d bytes: want 1 to %d", o.ID, len(o.ID),
					nodeapi.MaxRequestID)
			}
			if router == "" && len(addrs) == 0 {
				addrs = []string{local}
			}
			for _, addr := range addrs {
				bare, err := ask.Address(addr)
				if err != nil {
					return usage.Of(err)
				}
				o.Sidecars = append(o.Sidecars, bare)
			}
			r, err := why.Read(cmd.Context(), o)
			if err != nil {
				return err
			}
			if asJSON {
				return r.WriteJSON(cmd.OutOrStdout())
			}
			_, err = io.WriteString(cmd.OutOrStdout(), r.Text())
			return err
		},
	}
	cmd.Flags().StringArrayVar(&addrs, "http", nil, "host:port of a sidecar's http.listen; "+
		"repeatable (default "+local+", without --router)")
	cmd.Flags().StringVar(&router, "router", "", "URL of 'kvspray proxy' (its --listen), for "+
		"instance http://127.0.0.1:8000: it names the request's engines and their sidecars")
	command.OutputFlag(cmd, &asJSON)
	return cmd
}

func pingCommand() *cobra.Command {
	var flags configFlags
	var asJSON bool
	var count int
	cmd := &cobra.Command{
		Use:   "ping PEER",
		Short: "Check whether another sidecar answers; show round trip, MTU and rails",
		Long: `Connects to another sidecar as a sidecar does, with the keys of the configuration, and
measures the round trip. PEER is the host:port of that sidecar's peer.listen, or its node name if it
is a peer of the local sidecar. The local sidecar (--http) reports the rails to the peer, with their
learned delays and rates. The exit status is 1 if the peer does not answer or refuses the key.`,
		Example: `  kvspray ping 10.0.0.2:7650 --config /etc/kvspray/kvspray.yaml
  kvspray ping decode-0 --output json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if count < 1 || count > ping.MaxCount {
				return usage.Errorf("--count %d: want 1 to %d", count, ping.MaxCount)
			}
			c, err := flags.load()
			if err != nil {
				return err
			}
			r, err := ping.Run(cmd.Context(), ping.Options{Peer: args[0], Count: count, Config: c})
			if err != nil {
				return err
			}
			if asJSON {
				return r.WriteJSON(cmd.OutOrStdout())
			}
			return r.WriteText(cmd.OutOrStdout())
		},
	}
	flags.add(cmd)
	cmd.Flags().IntVar(&count, "count", 3, "round trips to measure")
	command.OutputFlag(cmd, &asJSON)
	return cmd
}

func bugreportCommand() *cobra.Command {
	var flags configFlags
	var out, python, log string
	cmd := &cobra.Command{
		Use:   "bugreport",
		Short: "Write an archive for a bug report, with names, addresses and keys replaced",
		Long: `Writes a tar.gz with the version, the configuration, doctor's checks, the state and metrics
of the running sidecar (--http), and properties of the host. With --log it adds the last 4 MiB of a
log file. It replaces addresses, key material, and names of hosts, nodes, users and requests. Equal
names get equal replacements. Read the archive before you send it.`,
		Example: `  kvspray bugreport --config /etc/kvspray/kvspray.yaml
  journalctl -u kvspray > kvspray.log && kvspray bugreport --log kvspray.log --out report.tar.gz`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := flags.load()
			if err != nil {
				return err
			}
			now := time.Now()
			if out == "" {
				out = "kvspray-bugreport-" + now.UTC().Format("20060102-150405") + ".tar.gz"
			}
			if err := checkParent("out", out); err != nil {
				return err
			}
			f, err := os.OpenFile(out, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
			if err != nil {
				return fmt.Errorf("--out: %w; name a file that does not exist yet", err)
			}
			err = bugreport.Write(cmd.Context(), bugreport.Options{Config: c, Python: python, Log: log,
				Now: now}, f)
			if err := errors.Join(err, f.Close()); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s\n", out)
			return err
		},
	}
	flags.add(cmd)
	cmd.Flags().StringVar(&out, "out", "", "file to write; default: "+
		"kvspray-bugreport-TIME.tar.gz in the current directory")
	cmd.Flags().StringVar(&log, "log", "", "log file of which the last 4 MiB are added")
	cmd.Flags().StringVar(&python, "python", "", "interpreter in which doctor looks for engines")
	return cmd
}
