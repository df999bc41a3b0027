package cli

import (
	"net/url"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/redact"
	"github.com/kvspray/kvspray/internal/ui/command"
	"github.com/kvspray/kvspray/internal/ui/loadctl"
	"github.com/kvspray/kvspray/internal/ui/usage"
)

func loadCommand() *cobra.Command {
	l := loadctl.Loader{Level: 2}
	cmd := &cobra.Command{
		Use:   "load SOURCE",
		Short: "Load other weights of the same shape into a running engine",
		Long: `Puts an engine of vLLM to sleep, loads the weights of SOURCE on all ranks, and wakes it up.
SOURCE is a directory of safetensors files on the engine's host, or http://HOST:PORT of one that
another node offers (python -m kvspray.offer).

A checkpoint of another shape is refused before a byte changes. If a load fails or the command is
stopped after the engine was put to sleep, it serves nothing until another load succeeds.`,
		Example: `  kvspray load /models/step-1200 --engine http://127.0.0.1:8000
  kvspray load http://10.0.0.7:7655 --engine http://127.0.0.1:8000`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			u, err := url.Parse(l.Engine)
			if err != nil || u.Scheme != "http" || u.Host == "" || strings.Trim(u.Path, "/") != "" {
				return usage.Errorf("--engine %q: want http://HOST:PORT of vllm serve",
					redact.URL(l.Engine))
			}
			l.Engine = "http://" + u.Host
			if l.Level != 1 && l.Level != 2 {
				return usage.Errorf("--level %d: want 1, or 2 to discard the present weights", l.Level)
			}
			if l.Source = args[0]; !strings.Contains(l.Source, "://") {
				if l.Source, err = filepath.Abs(l.Source); err != nil {
					return usage.Errorf("SOURCE %q: %v; write an absolute path", args[0], err)
				}
			}
			l.Out, l.Log = cmd.OutOrStdout(), cmd.ErrOrStderr()
			return l.Run(cmd.Context())
		},
	}
	cmd.Flags().StringVar(&l.Engine, "engine", "http://127.0.0.1:8000",
		"http://HOST:PORT of vllm serve")
	cmd.Flags().StringVar(&l.Socket, "socket", "", "unix socket of the sidecar on the engine's host "+
		"(default: its default)")
	cmd.Flags().IntVar(&l.Level, "level", l.Level, "level of sleep; 1 keeps the present weights in "+
		"host memory until the load begins")
	cmd.Flags().BoolVar(&l.Asleep, "stay-asleep", false, "leave the engine asleep after the load")
	cmd.Flags().BoolVar(&l.Force, "force", false, "load also where the shape of the engine's "+
		"checkpoint is not known: vLLM's loader alone compares shapes")
	command.OutputFlag(cmd, &l.JSON)
	return cmd
}
