package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/ui/command"
	"github.com/kvspray/kvspray/internal/ui/doctor"
	"github.com/kvspray/kvspray/internal/ui/rdmacheck"
	"github.com/kvspray/kvspray/internal/ui/usage"
)

func configCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Print or check the configuration", Args: cobra.NoArgs,
		RunE: command.Help}

	var printed configFlags
	var docs bool
	show := &cobra.Command{
		Use:   "print",
		Short: "Print the configuration that serve would use, as YAML with comments",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if docs {
				return config.WriteMarkdown(cmd.OutOrStdout())
			}
			c, err := printed.load()
			if err != nil {
				return err
			}
			return c.WriteYAML(cmd.OutOrStdout())
		},
	}
	printed.add(show)
	show.Flags().BoolVar(&docs, "docs", false,
		"print the reference page of all keys as Markdown instead")

	var checked configFlags
	var asJSON bool
	check := &cobra.Command{
		Use:   "check",
		Short: "Check the configuration and the files that it names",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := checked.load()
			if err == nil {
				err = checkFiles(c)
			}
			if asJSON {
				verdict := checkVerdict{OK: err == nil}
				if err != nil {
					verdict.Error = err.Error()
				}
				return errors.Join(err, json.NewEncoder(cmd.OutOrStdout()).Encode(verdict))
			}
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), "ok")
			return err
		},
	}
	checked.add(check)
	command.OutputFlag(check, &asJSON)
	cmd.AddCommand(show, check)
	return cmd
}

// checkVerdict is the output of config check --json.
type checkVerdict struct {
	OK    bool   `json:"ok"`
	Error string `json:"error,omitempty"`
}

func doctorCommand() *cobra.Command {
	var flags configFlags
	var asJSON, peers, rdma bool
	var python string
	test := rdmacheck.Program{Options: rdmacheck.Options{Rounds: rdmacheck.DefaultRounds,
		Span: rdmacheck.DefaultSpan}}
	cmd := &cobra.Command{
		Use:   "doctor [PEER]",
		Short: "Check what works on this host, with remedies for the rest",
		Long: `Checks what works on this host. Each line is one of:
  ok    works
  warn  does not work, or works worse, with the reason and the remedy; the sidecar runs without it
  fail  the sidecar does not run, or --python names no interpreter, with the reason and the remedy
  skip  this host has or needs nothing of the kind, or it could not be determined
The last line counts them. Exits with 1 if a check fails.

With --peers it asks the sidecar on this host instead which of its rails reach which rails of each
peer, over which transport, with
the reasons for the rest. Exits with 1 if a peer has no lane.

With --rdma it tests RDMA on each rail instead, with real queue pairs and memory of its own: in
loopback, or to a peer on which 'kvspray doctor --rdma --serve HOST' runs with the same cluster key
or with certificates (--config, or --set peer.cluster_key_file=FILE). A sidecar can run at the same
time; the tests take bandwidth from it for seconds. The page, and the JSON of --report, name
each fault with its remedy. They have no addresses and no names of hosts, so they can be sent to
others.
Exits with 1 if a test fails.`,
		Example: `  kvspray doctor
  kvspray doctor --rdma --report rdma.json
  kvspray doctor --rdma --config c.yaml --serve 10.0.0.6     # there
  kvspray doctor --rdma --config c.yaml 10.0.0.6              # here`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 && !rdma {
				return usage.Errorf("doctor got %q, and an argument is the peer of --rdma; type: kvspray "+
					"doctor [flags], or kvspray doctor --rdma %s", args[0], args[0])
			}
			c, err := flags.load()
			if err != nil {
				return err
			}
			if !rdma && (test.ServeAt != "" || test.Report != "") || rdma && peers {
				return usage.Errorf("--serve and --report are for --rdma, which excludes --peers")
			}
			if rdma {
				test.Config, test.JSON, test.Peer = c, asJSON, strings.Join(args, "")
				test.Stdout, test.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
				if err := test.Run(cmd.Context()); !errors.Is(err, rdmacheck.ErrFailed) {
					return err
				}
				return errUnhealthy
			}
			if python == "" && cmd.Flags().Changed("python") {
				return usage.Errorf(
					`--python "": empty, maybe an unset variable: name an interpreter, or omit it`)
			}
			if peers {
				return doctorPeers(cmd, c, asJSON)
			}
			results := doctor.Run(cmd.Context(), &doctor.Host{Config: c, Python: python})
			write := doctor.WriteText
			if asJSON {
				write = doctor.WriteJSON
			}
			if err := write(cmd.OutOrStdout(), results); err != nil {
				return err
			}
			if !doctor.Healthy(results) {
				return errUnhealthy
			}
			return nil
		},
	}
	flags.add(cmd)
	command.OutputFlag(cmd, &asJSON)
	cmd.Flags().BoolVar(&peers, "peers", false, "ask the running sidecar (--http) which rails reach "+
		"which peers")
	cmd.Flags().BoolVar(&rdma, "rdma", false, "test RDMA in loopback, or to PEER")
	cmd.Flags().StringVar(&test.ServeAt, "serve", "", "with --rdma: serve tests of others at "+
		"HOST[:PORT], until the command is ended (default port "+rdmacheck.DefaultPort+")")
	cmd.Flags().StringVar(&test.Report, "report", "", "with --rdma: a new file for the report as JSON")
	cmd.Flags().StringVar(&python, "python", "", "interpreter in which to look for engines "+
		"(default: $VIRTUAL_ENV's, else python3)")
	return cmd
}

func doctorPeers(cmd *cobra.Command, c *config.Config, asJSON bool) error {
	if c.HTTP.Listen == config.Off {
		return usage.Errorf("--peers with http.listen off: configure an address for the running " +
			"sidecar, and name it with --http")
	}
	r, err := doctor.Peers(cmd.Context(), c)
	if err != nil {
		return err
	}
	write := r.WriteText
	if asJSON {
		write = r.WriteJSON
	}
	if err := write(cmd.OutOrStdout()); err != nil {
		return err
	}
	if !r.Reached() {
		return errUnhealthy
	}
	return nil
}
