// Package command runs the command line of a program: signals, exit codes, the form of errors, the
// command version. Every program of this module uses it, so that all report errors alike.
//
// Run owns the process's signals. Commands end when their context ends. No goroutines of its own.
package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/internal/version"
)

// Exit codes of a program.
const (
	ExitOK      = 0
	ExitFailure = 1 // it ran, and failed
	ExitUsage   = 2 // usage error in arguments, flags or configuration: nothing ran
	// ExitPipe: the output has no reader any more. Shells show it for programs that SIGPIPE ended.
	ExitPipe = 141
)

// Finish completes a program's root command, after its subcommands were added: the version, and
// usage errors with the correct form.
func Finish(root *cobra.Command) {
	root.Version = versionText(root.Name())
	root.SetVersionTemplate("{{.Version}}")
	root.SilenceErrors, root.SilenceUsage = true, true
	root.RunE = Help
	root.AddCommand(versionCommand(root.Name()))
	explainUsage(root)
	explainHelp(root)
}

// Help prints the help of a command that only has subcommands.
func Help(c *cobra.Command, _ []string) error { return c.Help() }

// Run runs a command line and returns the exit code. A second SIGINT or SIGTERM ends the process at
// once. SIGPIPE does not: a command continues without a reader of its log or output, and ends only
// by an error that it returns.
func Run(root *cobra.Command, args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// After the first signal the default action is restored, so that a second one ends a hanging
	// process.
	context.AfterFunc(ctx, stop)
	// With a handler of SIGPIPE a write to standard output or error fails, and the runtime does not
	// end the process. An ignored signal would do the same, but child processes inherit that.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE)
	defer signal.Stop(pipe)

	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return ExitOK
	}
	if errors.Is(err, context.Canceled) && ctx.Err() != nil {
		err = errors.New("interrupted") // by the user; the place does not matter
	}
	if noReader(err) {
		return ExitPipe
	}
	_, _ = fmt.Fprintf(stderr, "%s: %v\n", root.Name(), err) // no other place for a message
	if usage.Is(err) {
		_, _ = fmt.Fprintf(stderr, "See '%s --help'.\n", cmd.CommandPath())
		return ExitUsage
	}
	return ExitFailure
}

// noReader reports whether the output has failed because it has no reader any more, as with
// `| head`.
func noReader(err error) bool {
	var at *os.PathError
	return errors.As(err, &at) && at.Err == syscall.EPIPE && at.Path == os.Stdout.Name()
}

// versionText is the output of the command version and of the flag --version.
func versionText(program string) string {
	return fmt.Sprintf("%s %s (%s)\n", program, version.String(), version.Go())
}

func versionCommand(program string) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if asJSON {
				v := map[string]string{"version": version.String(), "go": version.Go()}
				return json.NewEncoder(cmd.OutOrStdout()).Encode(v)
			}
			_, err := fmt.Fprint(cmd.OutOrStdout(), versionText(program))
			return err
		},
	}
	OutputFlag(cmd, &asJSON)
	return cmd
}
