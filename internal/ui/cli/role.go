package cli

import (
	"net/http"
	"net/url"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/nodeapi"
	"github.com/kvspray/kvspray/internal/ui/ask"
	"github.com/kvspray/kvspray/internal/ui/usage"
)

func roleCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "role",
		Short: "What an engine computes for routers that find it by gossip",
		Args:  cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
	cmd.AddCommand(roleSetCommand())
	return cmd
}

func roleSetCommand() *cobra.Command {
	var socket string
	cmd := &cobra.Command{
		Use:   "set ENGINE prefill|decode|both",
		Short: "Change the role of an engine while it runs",
		Long: `Changes what routers with --join send to an engine of this host's sidecar. ENGINE is its
URL, or its id. Requests that the engine has under the old role go on to their end. An engine with a
kv_role of its own keeps that: only one with kv_both can change. The role lasts until the sidecar
ends; engine.role is for longer.`,
		Example: `  kvspray role set http://10.0.0.7:8000 decode`,
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			admin, err := adminSocket(socket)
			if err != nil {
				return err
			}
			switch args[1] {
			case config.RolePrefill, config.RoleDecode, config.RoleBoth:
			default:
				return usage.Errorf("role %q is not one of prefill, decode, both", args[1])
			}
			path := "/v1/role?" + url.Values{"engine": args[:1], "role": args[1:]}.Encode()
			b, err := ask.Admin(cmd.Context(), http.MethodPost, admin, path)
			if err != nil {
				return err
			}
			var node nodeapi.Node
			return ask.Decode(admin, path, b, &node)
		},
	}
	socketFlag(cmd, &socket)
	return cmd
}
