// Package cli holds the commands of the kvspray binary. Each converts flags to the configuration of
// one package and runs it; no command does work of its own.
//
// Commands end when their context ends. No goroutines of its own.
package cli

import (
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/lines"
	"github.com/kvspray/kvspray/internal/ui/command"
	"github.com/kvspray/kvspray/internal/ui/usage"
)

// errUnhealthy is the result of doctor and check, which have printed the details.
var errUnhealthy = errors.New("a check failed")

// Main runs the command line and returns the exit code.
func Main(args []string, stdout, stderr io.Writer) int {
	return command.Run(newRoot(), args, stdout, stderr)
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "kvspray",
		Short: "Moves KV cache between LLM serving engines",
		Long: `kvspray is a sidecar that moves KV cache between LLM serving engines.

Try it on this host with vLLM:        kvspray try
Start one next to each engine:        kvspray serve
Route requests to prefill and decode: kvspray proxy --engine url=URL,role=ROLE ...
Check what works on this host:        kvspray doctor
See what a sidecar does:              kvspray status
Explain one request:                  kvspray why ID`,
	}
	root.AddCommand(serveCommand(), configCommand(), doctorCommand(), keygenCommand(), proxyCommand(),
		tryCommand(), calibrateCommand(), layoutCommand(), loadCommand(), placeCommand(),
		statusCommand(), whyCommand(), pingCommand(), bugreportCommand(), storeCommand(),
		drainCommand(), roleCommand())
	command.Finish(root)
	return root
}

// tryCommand names the Python package, which has the command: it starts engines.
func tryCommand() *cobra.Command {
	return &cobra.Command{
		Use:                "try",
		Short:              "Compare a pair of vLLM engines with a plain one (in the Python package)",
		DisableFlagParsing: true,
		Args:               cobra.ArbitraryArgs,
		RunE: func(_ *cobra.Command, args []string) error {
			return usage.Errorf("this binary starts no engines: python -m pip install 'kvspray[vllm]' in "+
				"the environment of your vLLM, and type: %s",
				strings.Join(append([]string{"kvspray try"}, args...), " "))
		},
	}
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
	cmd.Flags().StringVar(&f.file, "config", "", "strict YAML file; 'kvspray config print' shows "+
		"every key (default: built-in values on loopback)")
	cmd.Flags().StringVar(&f.socket, "socket", "", "unix socket for engines; short for --set "+
		"engine.socket=")
	cmd.Flags().StringVar(&f.listen, "listen", "", "host:port for other sidecars, port 0 takes a "+
		"free one; short for --set peer.listen=")
	cmd.Flags().StringVar(&f.http, "http", "", "host:port for health and metrics, or off; short for "+
		"--set http.listen=")
	cmd.Flags().StringArrayVar(&f.sets, "set", nil, "key=value that overrides the file, for "+
		"instance transports.tcp.integrity=off; repeatable; "+config.EnvPrefix+
		"TRANSPORTS_TCP_INTEGRITY=off in the environment does the same")
}

func (f *configFlags) load() (*config.Config, error) {
	for _, s := range f.sets {
		if key, _, ok := strings.Cut(s, "="); !ok || key == "" {
			return nil, usage.Errorf("--set %q: not of the form key=value: write for instance --set "+
				"transports.tcp.integrity=off", s)
		}
	}
	sets, err := config.FromEnvironment(os.Environ())
	if err != nil {
		return nil, usage.Of(err)
	}
	sets = append(sets, f.sets...)
	for _, s := range []struct{ flag, key, value string }{{"config", "", f.file},
		{"socket", "engine.socket", f.socket}, {"listen", "peer.listen", f.listen},
		{"http", "http.listen", f.http}} {
		switch {
		case s.value == "" && f.cmd.Flags().Changed(s.flag):
			return nil,
				usage.Errorf(
					`--%s "": empty, maybe an unset variable: give it a value, or omit it for the default`, s.flag)
		case s.value != "" && s.key != "":
			sets = append(sets, s.key+"="+s.value)
		}
	}
	c, err := config.Load(f.file, sets...)
	if err != nil {
		return nil, usage.Of(err)
	}
	return c, nil
}

// socketFlag adds the flag of commands that change a running sidecar.
func socketFlag(cmd *cobra.Command, socket *string) {
	cmd.Flags().StringVar(socket, "socket", config.DefaultSocket(os.Getenv("XDG_RUNTIME_DIR"),
		os.Getuid()), "the sidecar's engine.socket, beside which it has one for this command")
}

// adminSocket is the socket for calls that change the sidecar of an engine.socket.
func adminSocket(socket string) (string, error) {
	if !filepath.IsAbs(socket) {
		return "", usage.Errorf("--socket %q: not an absolute path: name the sidecar's engine.socket, "+
			"which it logs as socket= when it is ready", socket)
	}
	return config.AdminSocket(socket), nil
}

// checkParent checks at start that the directory exists of a file that the command writes at its
// end; empty: no file.
func checkParent(flag, path string) error {
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
		return usage.Errorf("--%s %q: %w: name a file in an existing directory", flag, path, err)
	}
	return nil
}

// readyFile is checkParent for the file of writeReady, and checks that it can be written:
// otherwise a script would wait for the file for ever.
func readyFile(path string) error {
	if err := checkParent("ready-file", path); err != nil || path == "" {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), readyTemp)
	if err == nil {
		err = errors.Join(tmp.Close(), os.Remove(tmp.Name()))
	}
	if err != nil {
		return usage.Errorf("--ready-file %q: %w: name a file in a directory that this user may write to",
			path, err)
	}
	return nil
}

// checkFiles checks the files that a configuration names, including keys and certificates.
func checkFiles(c *config.Config) error {
	if err := c.CheckFiles(); err != nil {
		return usage.Of(err)
	}
	if _, err := keys.Check(c.Peer.ClusterKeyFile, c.Peer.TLS.Cert, c.Peer.TLS.Key, c.Peer.TLS.CA,
		time.Now()); err != nil {
		return usage.Of(err)
	}
	return nil
}

// openLog makes the logger of a process that serves others. A destination that stalls, such as a
// pipe without a reader, does not hold the process up. A later line has the number of lines that
// are missing. flush ends the logger.
func openLog(w io.Writer, level slog.Level, format string) (log *slog.Logger, flush func()) {
	out := lines.New(w, func(n int) {
		log.Warn("log lines are missing: their destination took none for a while", "lines", n)
	}, nil)
	log = newLog(out, level, format)
	return log, func() { _ = out.Close() }
}

func newLog(w io.Writer, level slog.Level, format string) *slog.Logger {
	opts := &slog.HandlerOptions{Level: level}
	if format == config.FormJSON {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}
