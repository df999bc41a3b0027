package command

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/spf13/cobra"
)

// The variable makes the test binary a program with the command that it names.
const asProgram = "KVSPRAY_TEST_COMMAND"

func TestMain(m *testing.M) {
	name := os.Getenv(asProgram)
	if name == "" {
		os.Exit(m.Run())
	}
	root := &cobra.Command{Use: "program"}
	root.AddCommand(
		&cobra.Command{Use: "serve", RunE: func(c *cobra.Command, _ []string) error {
			for range 3 { // a log without a reader
				if _, err := fmt.Fprintln(c.ErrOrStderr(), "line"); !errors.Is(err, syscall.EPIPE) {
					return fmt.Errorf("log: %w, want EPIPE", err)
				}
			}
			_, err := fmt.Fprintln(c.OutOrStdout(), "the end of the work")
			return err
		}},
		&cobra.Command{Use: "print", RunE: func(c *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(c.OutOrStdout(), "line")
			return err
		}})
	Finish(root)
	os.Exit(Run(root, []string{name}, os.Stdout, os.Stderr))
}

// program is this binary as a program; the pipe has no reader.
func program(t *testing.T, name string) (cmd *exec.Cmd, pipe *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Close() })
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	cmd = exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), asProgram+"="+name)
	return cmd, w
}

// The loss of a log's reader ends no command: serve has engines and peers to serve.
func TestReaderOfTheLogGoesAway(t *testing.T) {
	t.Parallel()
	cmd, pipe := program(t, "serve")
	cmd.Stderr = pipe
	if out, err := cmd.Output(); err != nil || string(out) != "the end of the work\n" {
		t.Errorf("%v, output %q: the work was not done to its end", err, out)
	}
}

// A command whose output has no reader ends with the status of SIGPIPE and without a message.
func TestReaderOfTheOutputGoesAway(t *testing.T) {
	t.Parallel()
	cmd, pipe := program(t, "print")
	cmd.Stdout = pipe
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	text := make([]byte, 256)
	n, _ := stderr.Read(text) // the end, which is an error
	err = cmd.Wait()
	if cmd.ProcessState.ExitCode() != ExitPipe || n != 0 {
		t.Errorf("%v, message %q: want status %d", err, text[:n], ExitPipe)
	}
}
