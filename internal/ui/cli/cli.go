// SPDX-License-Identifier: Apache-2.0

// Package cli holds the commands of the kvspray binary. Each converts flags to the configuration of
// one package and runs it; no command does work of its own.
//
// Main owns the process's signals. Commands end when their context ends. No goroutines of its own.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/ui/mistake"
)

// Exit codes of the binary.
const (
	exitOK      = 0
	exitFailure = 1 // it ran, and failed
	exitUsage   = 2 // usage error in arguments, flags or configuration: nothing ran
)

func usage(err error) error { return mistake.Of(err) }

// errUnhealthy is the result of doctor and check, which have printed the details.
var errUnhealthy = errors.New("a required check failed")

// Main runs the command line and returns the exit code. A second SIGINT or SIGTERM ends the process
// at once.
func Main(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// After the first signal the default action is restored, so that a second one ends a hanging
	// process.
	context.AfterFunc(ctx, stop)

	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitOK
	}
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		err = errors.New("interrupted") // by the user; the place does not matter
	}
	_, _ = fmt.Fprintf(stderr, "kvspray: %v\n", err) // no other place for a message
	if mistake.Is(err) {
		_, _ = fmt.Fprintf(stderr, "See '%s --help'.\n", cmd.CommandPath())
		return exitUsage
	}
	return exitFailure
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "kvspray",
		Short: "Moves KV cache between LLM serving engines",
		Long: `kvspray is a sidecar that moves KV cache between LLM serving engines.

Start one next to each engine:        kvspray serve
Route requests to prefill and decode: kvspray proxy --prefill URL --decode URL
Check what works on this host:        kvspray doctor`,
		Version:       versionText(),
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetVersionTemplate("{{.Version}}")
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(serveCommand(), configCommand(), versionCommand(), doctorCommand(), keygenCommand(), proxyCommand(), benchCommand(), calibrateCommand(), layoutCommand(), topCommand())
	teach(root)
	teachHelp(root)
	return root
}

// configFlags are the flags of every command with a configuration.
type configFlags struct {
	cmd    *cobra.Command
	file   string
	socket string
	listen string
	http   string
	sets   []string
}

func (f *configFlags) add(cmd *cobra.Command) {
	f.cmd = cmd
	cmd.Flags().StringVar(&f.file, "config", "", "strict YAML file; 'kvspray config print' shows every key (default: built-in values on loopback)")
	cmd.Flags().StringVar(&f.socket, "socket", "", "unix socket for engines; short for --set engine.socket=")
	cmd.Flags().StringVar(&f.listen, "listen", "", "host:port for other sidecars, port 0 takes a free one; short for --set peer.listen=")
	cmd.Flags().StringVar(&f.http, "http", "", "host:port for health and metrics, or off; short for --set http.listen=")
	cmd.Flags().StringArrayVar(&f.sets, "set", nil, "key=value that overrides the file, for instance transports.tcp.integrity=off; repeatable")
}

func (f *configFlags) load() (*config.Config, error) {
	for _, s := range f.sets {
		if key, _, ok := strings.Cut(s, "="); !ok || key == "" {
			return nil, mistake.Errorf("--set %q: not of the form key=value: write for instance --set transports.tcp.integrity=off", s)
		}
	}
	sets := f.sets
	for _, s := range []struct{ flag, key, value string }{{"config", "", f.file}, {"socket", "engine.socket", f.socket}, {"listen", "peer.listen", f.listen}, {"http", "http.listen", f.http}} {
		switch {
		case s.value == "" && f.cmd.Flags().Changed(s.flag):
			return nil, mistake.Errorf(`--%s "": empty, maybe an unset variable: give it a value, or omit it for the default`, s.flag)
		case s.value != "" && s.key != "":
			sets = append(sets, s.key+"="+s.value)
		}
	}
	c, err := config.Load(f.file, sets...)
	if err != nil {
		return nil, usage(err)
	}
	return c, nil
}

// inFolder checks at start that the directory exists for a file that the command writes at its end;
// empty: no file.
func inFolder(flag, path string) error {
	if path == "" {
		return nil
	}
	st, err := os.Stat(filepath.Dir(path))
	if err == nil && !st.IsDir() {
		err = errors.New("not a directory")
	}
	if err == nil {
		if st, serr := os.Stat(path); serr == nil && st.IsDir() {
			err = errors.New("is a directory")
		}
	}
	if err != nil {
		return mistake.Errorf("--%s %q: %w: name a file in an existing directory", flag, path, err)
	}
	return nil
}

// readyFile is inFolder for the file of writeReady, and checks that it can be written: otherwise a
// script would wait for the file for ever.
func readyFile(path string) error {
	if err := inFolder("ready-file", path); err != nil || path == "" {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), readyTemp)
	if err == nil {
		err = errors.Join(tmp.Close(), os.Remove(tmp.Name()))
	}
	if err != nil {
		return mistake.Errorf("--ready-file %q: %w: name a file in a directory that this user may write to", path, err)
	}
	return nil
}

// checkFiles checks the files that a configuration names, including keys and certificates.
func checkFiles(c *config.Config) error {
	if err := c.CheckFiles(); err != nil {
		return usage(err)
	}
	if _, err := keys.Check(c.Peer.ClusterKeyFile, c.Peer.TLS.Cert, c.Peer.TLS.Key, c.Peer.TLS.CA, time.Now()); err != nil {
		return usage(err)
	}
	return nil
}

// newLog makes the logger of the process.
func newLog(w io.Writer, level slog.Level, format string) *slog.Logger {
	opts := &slog.HandlerOptions{Level: level}
	if format == config.FormJSON {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}
