package railsbench

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/lab/chart"
	"github.com/kvspray/kvspray/lab/railsbench/netrig"
	"github.com/kvspray/kvspray/lab/timeline"
)

// NewCommand returns the `rails` command.
func NewCommand() *cobra.Command {
	var claims, integrity, sidecar string
	var plain time.Duration
	var set []string
	var receivers int
	c := &cobra.Command{
		Use:   "rails",
		Short: "Move KV blocks over several rails between two sidecars, while rails fail",
		Long: `Builds two network namespaces joined by a veth pair per rail, each shaped to its rate,
measures every rail alone and all at once with plain streams, and then moves scattered blocks from
one real sidecar to another over all of them, while the faults happen. Content is compared after
every transfer. Shares are of what plain streams carry over the same rails, all at once. Needs root,
or the right to make network namespaces. Nothing that it makes outlives it.

With --receivers there is a switch in each rail, and a sidecar at each of its ports. Then it
measures what receivers do to each other: how long --total (8MiB by default) takes that a decode
waits for, alone, beside background to all other receivers, and beside layer streams to them; how
evenly layer streams to all receivers share the rails; and the same with all of them sending to one.
Each of that takes --duration (10s).`,
		Example: `  kvspray-bench rails
  kvspray-bench rails --rates 2gbit,1gbit,500mbit,500mbit --duration 8s --fault 2s:rail0:down --fault 5s:rail0:up --html rails.html
  kvspray-bench rails --receivers 16 --rates 1gbit --json receivers.json
  kvspray-bench rails --claims 2gbit,1gbit,500mbit,500mbit`,
		Args: cobra.NoArgs,
	}
	flags := timeline.AddFlags(c)
	c.Flags().StringVar(&claims, "claims", "", "what the links claim, separated by commas: the "+
		"sidecars are configured with it (default: nothing)")
	c.Flags().StringVar(&integrity, "integrity", "", "off, crc32c or aead (default: the sidecar's)")
	c.Flags().DurationVar(&plain, "plain", plainSpan, "how long plain streams over all rails at "+
		"once are measured; over one alone, a second at most")
	c.Flags().StringArrayVar(&set, "set", nil, "key=value of the sidecars' configuration; repeatable")
	c.Flags().IntVar(&receivers, "receivers", 1, "sidecars that receive; more than one: measure how "+
		"they share the rails")
	c.Flags().StringVar(&sidecar, SidecarFlag, "", SidecarUsage)
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		o, err := flags.Options()
		if err != nil {
			return err
		}
		if plain < minPlain || plain > maxPlain {
			return usage.Errorf("--plain %s: must be from %s to %s", plain, minPlain, maxPlain)
		}
		if integrity != "" && integrity != "off" && integrity != "crc32c" && integrity != "aead" {
			return usage.Errorf("--integrity %q: want off, crc32c or aead", integrity)
		}
		if receivers < 1 {
			return usage.Errorf("--receivers %d: must be 1 to %d", receivers, netrig.MaxReceivers)
		}
		if receivers > 1 {
			if !cmd.Flags().Changed("total") {
				o.Total = timeline.Whole(urgentTotal, o.Block)
			}
			if !cmd.Flags().Changed("duration") {
				o.Duration = phaseSpan
			}
			if err := checkReceivers(o, receivers); err != nil {
				return usage.Of(err)
			}
		}
		s := Setup{Rates: o.Rates, Receivers: receivers, Integrity: integrity, Set: set,
			Plain: plain}
		if claims != "" {
			for _, part := range strings.Split(claims, ",") {
				r, err := timeline.ParseRate(strings.TrimSpace(part))
				if err != nil {
					return usage.Errorf("--claims: %w", err)
				}
				s.Claims = append(s.Claims, r)
			}
			if len(s.Claims) != len(s.Rates) {
				return usage.Errorf("--claims %s: %d rates for the %d rails of --rates: want one for each",
					claims, len(s.Claims), len(s.Rates))
			}
		}
		if s.Kvspray, err = FindSidecar(sidecar); err != nil {
			return err
		}
		if receivers > 1 {
			res, err := RunReceivers(cmd.Context(), o, s, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if err := o.Store(cmd.OutOrStdout(), res); err != nil {
				return err
			}
			return res.failure()
		}
		res, err := Run(cmd.Context(), o, s, cmd.ErrOrStderr())
		if err != nil {
			return err
		}
		if err := o.Save(res, cmd.OutOrStdout(), chart.Of("kvspray-bench rails")); err != nil {
			return err
		}
		if res.Failed > 0 {
			return fmt.Errorf("%d of %d transfers failed", res.Failed, len(res.Transfers))
		}
		return nil
	}
	return c
}
