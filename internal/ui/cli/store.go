package cli

import (
	"context"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/ui/ask"
	"github.com/kvspray/kvspray/internal/ui/command"
	"github.com/kvspray/kvspray/internal/ui/storectl"
	"github.com/kvspray/kvspray/internal/ui/usage"
)

const (
	defaultKeys  = 100
	maxKeys      = 1000
	drainTimeout = 10 * time.Minute
)

func storeCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "store", Short: "Show, drain, clear or check a page store",
		Long: `Shows or drains the page store of a running sidecar, removes a namespace from all stores,
or checks the files of a store that no sidecar has open. stat, and ls without --namespace, ask its
HTTP address (http.listen). The others use a socket beside that of its engines (engine.socket), and
work for root, for the sidecar's user and for those in engine.admin_uids.`,
		Args: cobra.NoArgs, RunE: command.Help}
	cmd.AddCommand(storeStat(), storeList(), storeGet(), storeDrain(), storeRemove(), storeCheck())
	return cmd
}

// storeFlags are the flags of commands that ask a sidecar: over HTTP, or over the admin socket.
type storeFlags struct {
	addr, socket string
	asJSON       bool
}

func (f *storeFlags) http(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.addr, "http", fmt.Sprintf("127.0.0.1:%d", config.DefaultHTTPPort),
		"host:port of the sidecar's http.listen")
}

func (f *storeFlags) admin(cmd *cobra.Command) { socketFlag(cmd, &f.socket) }

func (f *storeFlags) client(cmd *cobra.Command) (*storectl.Client, error) {
	c := &storectl.Client{JSON: f.asJSON, Out: cmd.OutOrStdout()}
	var err error
	if cmd.Flags().Lookup("http") != nil {
		if c.Addr, err = ask.Address(f.addr); err != nil {
			return nil, usage.Of(err)
		}
	}
	if cmd.Flags().Lookup("socket") != nil {
		if c.Admin, err = adminSocket(f.socket); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func hash(flag, s string) error {
	if b, err := hex.DecodeString(s); err != nil || len(b) != 32 {
		return usage.Errorf("%s %q: want 64 hexadecimal digits, as 'kvspray store ls' prints them", flag,
			s)
	}
	return nil
}

func storeStat() *cobra.Command {
	var f storeFlags
	cmd := &cobra.Command{
		Use:   "stat",
		Short: "Print tiers, bytes, hits and eviction ages",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := f.client(cmd)
			if err != nil {
				return err
			}
			return c.Stat(cmd.Context())
		},
	}
	f.http(cmd)
	command.OutputFlag(cmd, &f.asJSON)
	return cmd
}

func storeList() *cobra.Command {
	var f storeFlags
	var namespace, tier string
	var first uint32
	var limit int
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List the namespaces that engines have open, or keys of one",
		Example: `  kvspray store ls
  kvspray store ls --namespace ID --tier disk --limit 1000`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := f.client(cmd)
			if err != nil {
				return err
			}
			if namespace == "" {
				return c.List(cmd.Context())
			}
			if err := hash("--namespace", namespace); err != nil {
				return err
			}
			if limit < 1 || limit > maxKeys {
				return usage.Errorf("--limit %d: want 1 to %d; --first goes on after them", limit, maxKeys)
			}
			return c.Keys(cmd.Context(), namespace, tier, first, limit)
		},
	}
	f.http(cmd)
	f.admin(cmd)
	command.OutputFlag(cmd, &f.asJSON)
	cmd.Flags().StringVar(&namespace, "namespace", "", "id of a namespace: list its keys, "+
		"in no order")
	cmd.Flags().StringVar(&tier, "tier", "memory", "with --namespace: memory or disk")
	cmd.Flags().IntVar(&limit, "limit", defaultKeys, "with --namespace: most keys to list")
	cmd.Flags().Uint32Var(&first, "first", 0, "with --namespace: entry to start from, as the "+
		"previous ls printed it")
	return cmd
}

func storeGet() *cobra.Command {
	var f storeFlags
	var namespace string
	var verify bool
	cmd := &cobra.Command{
		Use:   "get KEY",
		Short: "Read a page in the sidecar and compare it with its checksum",
		Long: `Makes the sidecar read a page as for a get of an engine, and prints the page's tier and
checksum. The page itself does not leave the sidecar, because it is made of a tenant's text. The
exit status is 1 if the page is missing or damaged.`,
		Example: "  kvspray store get --verify --namespace ID KEY",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := f.client(cmd)
			if err != nil {
				return err
			}
			if !verify {
				return usage.Errorf("get prints no content, which is made of a tenant's text: pass " +
					"--verify to compare the page with its checksum")
			}
			if err := hash("--namespace", namespace); err != nil {
				return err
			}
			if err := hash("KEY", args[0]); err != nil {
				return err
			}
			return c.Verify(cmd.Context(), namespace, args[0])
		},
	}
	f.admin(cmd)
	command.OutputFlag(cmd, &f.asJSON)
	cmd.Flags().StringVar(&namespace, "namespace", "", "id of the page's namespace, as "+
		"'kvspray store ls' lists it")
	cmd.Flags().BoolVar(&verify, "verify", false, "compare the page with its checksum")
	return cmd
}

func storeDrain() *cobra.Command {
	var f storeFlags
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "drain",
		Short: "Refuse new pages, and wait until all pages are durable",
		Long: `Makes the sidecar refuse new pages, and waits until the pages that it has are durable: on
the disk, and in the object store if the configuration sends them there. The sidecar still answers
gets. It accepts new pages again after a restart.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := f.client(cmd)
			if err != nil {
				return err
			}
			if timeout <= 0 {
				return usage.Errorf("--timeout %v: want more than 0", timeout)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return c.Drain(ctx)
		},
	}
	f.admin(cmd)
	command.OutputFlag(cmd, &f.asJSON)
	cmd.Flags().DurationVar(&timeout, "timeout", drainTimeout, "longest wait; the store refuses "+
		"new pages after it, too")
	return cmd
}

func storeRemove() *cobra.Command {
	var f storeFlags
	var unknown bool
	cmd := &cobra.Command{
		Use:   "remove NAMESPACE",
		Short: "Remove all pages of a namespace from all nodes",
		Long: `Removes all pages of a namespace from memory, disks and object stores of all nodes. It
prints the nodes that have not confirmed, with the reasons, and then exits with status 1. A node
that cannot be reached removes the pages when it meets one of the others again. Pages that engines
put after the removal stay.`,
		Example: "  kvspray store remove ID",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := f.client(cmd)
			if err != nil {
				return err
			}
			if err := hash("NAMESPACE", args[0]); err != nil {
				return err
			}
			return c.Remove(cmd.Context(), args[0], unknown)
		},
	}
	f.admin(cmd)
	command.OutputFlag(cmd, &f.asJSON)
	cmd.Flags().BoolVar(&unknown, "unknown", false, "remove it although this node has no pages of it")
	return cmd
}

func storeCheck() *cobra.Command {
	var f configFlags
	var disks []string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "fsck",
		Short: "Check the disks of a store that no sidecar has open",
		Long: `Reads all segments of a disk store and compares each page with its checksum. It writes
nothing. It prints damaged pages and segments, and then exits with status 1. If a sidecar was killed
before it acknowledged a page, the page may be incomplete. fsck prints such a page, but does not
count it as damage.`,
		Example: `  kvspray store fsck --config kvspray.yaml
  kvspray store fsck --disk /nvme0/kv --disk /nvme1/kv`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if len(disks) == 0 {
				c, err := f.load()
				if err != nil {
					return err
				}
				for _, d := range c.Store.Disk {
					disks = append(disks, d.Path)
				}
			}
			if len(disks) == 0 {
				return usage.Errorf("the configuration names no store.disk: pass --config FILE of the " +
					"sidecar, or --disk PATH")
			}
			return storectl.Check(cmd.Context(), disks, asJSON, cmd.OutOrStdout())
		},
	}
	f.add(cmd)
	cmd.Flags().StringArrayVar(&disks, "disk", nil, "path of store.disk; repeat it for each, in the "+
		"configuration's order (default: those of --config)")
	command.OutputFlag(cmd, &asJSON)
	return cmd
}
