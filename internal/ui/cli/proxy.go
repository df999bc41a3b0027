package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/internal/version"
	"github.com/kvspray/kvspray/proxy"
)

func proxyCommand() *cobra.Command {
	var flags routerFlags
	cmd := &cobra.Command{
		Use:   "proxy",
		Short: "Route OpenAI-compatible requests to prefill and decode engines",
		Long: `Routes /v1/completions and /v1/chat/completions to one prefill engine and one decode engine
each, and streams the decode engine's answer back. Health is at /health, metrics are at /metrics.

With --join the router finds the engines of all sidecars of a cluster, and follows those that come
and go. Otherwise engines are in the file of --config, or each in an --engine with the same keys:

  url      API server of the engine
  role     prefill, decode or both
  sidecar  URL of its sidecar (http.listen): shows that the engine leaves (kvspray drain), and has
           the rates for a policy
  peer     host:port of the sidecar of an engine that prefills (peer.listen). Mode concurrent needs
           it, or sidecar to ask for it.
  events   endpoint of its KV events, and
  replay   of their replay (vLLM's --kv-events-config): a policy then takes its hits from them,
           instead of guessing by what it sent there

SIGHUP makes the router read the engines of the file again. If the file has a mistake, the router
logs it and goes on as before.

If the prefill engine fails, another one computes the prompt, or the decode engine itself. An engine
that fails, is slow or silent before the client has a byte is replaced by a better one.`,
		Example: `  kvspray proxy --engine url=http://127.0.0.1:8100,role=prefill,peer=127.0.0.1:7650 \
      --engine url=http://127.0.0.1:8200,role=decode
  kvspray proxy --config router.yaml
  kvspray proxy --join 10.0.0.7:7652 --cluster-key-file cluster.key`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return flags.run(cmd) },
	}
	flags.add(cmd)
	return cmd
}

// routerFlags are the flags of proxy: one for each key of config.Router.
type routerFlags struct {
	file, ready   string
	sets, engines []string
}

func (r *routerFlags) add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&r.file, "config", "", "strict YAML file; docs/config.md has its keys")
	f.StringArrayVar(&r.engines, "engine", nil, "url=URL,role=ROLE and more keys of an engine, "+
		"separated by commas; repeatable, after those of the file")
	for _, k := range config.RouterFields() {
		if !k.Section && !strings.Contains(k.Key, "[]") {
			name := strings.NewReplacer("_", "-", ".", "-").Replace(k.Key)
			flag := f.VarPF(&keyFlag{k, &r.sets}, name, "", k.Doc)
			if k.Default == "false" {
				flag.NoOptDefVal = "true" // --continue is --continue=true
			}
		}
	}
	f.StringVar(&r.ready, "ready-file", "", "file for the bound address as JSON, written once "+
		"listening; for scripts that use port 0")
}

// keyFlag sets one key of a configuration.
type keyFlag struct {
	config.Field
	sets *[]string
}

func (k *keyFlag) String() string { return k.Default }
func (k *keyFlag) Type() string   { return k.Unit }

func (k *keyFlag) Set(text string) error {
	*k.sets = append(*k.sets, k.Key+"="+text)
	return nil
}

func (r *routerFlags) run(cmd *cobra.Command) error {
	if r.file == "" && cmd.Flags().Changed("config") {
		return usage.Errorf(`--config "": empty, maybe an unset variable: give it a value, or omit it`)
	}
	c, err := config.LoadRouter(r.file, r.sets, r.engines)
	if err != nil {
		return usage.Of(err)
	}
	if err := readyFile(r.ready); err != nil {
		return err
	}
	cfg := routerConfig(c)
	if cfg.Calibration, err = readCalibration(c.Calibration); err != nil {
		return err
	}
	log, flush := openLog(cmd.ErrOrStderr(), c.Log.Severity(), c.Log.Format)
	defer flush()
	cfg.Log, cfg.Registry = log, newRegistry()
	if len(c.Join) > 0 {
		f, err := openFleet(cmd.Context(), c, log)
		if err != nil {
			return err
		}
		defer f.close()
		cfg.Fleet, cfg.Allow = f, c.Allow
	}
	p, err := proxy.New(cfg)
	if err != nil {
		return usage.Of(err)
	}
	var lc net.ListenConfig
	l, err := lc.Listen(cmd.Context(), "tcp", c.Listen)
	if err != nil {
		return fmt.Errorf("proxy: listen: %w; give --listen a free host:port", err)
	}
	log.Info("proxy is listening", "address", l.Addr().String(), "mode", c.Mode, "policy", c.Policy,
		"prefill", len(cfg.Prefill), "decode", len(cfg.Decode))
	if err := writeReady(r.ready, map[string]string{"http": l.Addr().String()}); err != nil {
		return errors.Join(err, l.Close())
	}
	if r.file == "" {
		return p.Serve(cmd.Context(), l)
	}
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	ctx, stop := context.WithCancel(cmd.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	wg.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-hup:
				r.reload(c, p, log)
			}
		}
	})
	return p.Serve(ctx, l)
}

// reload takes the engines of the file again. c is the configuration from the start, whose other
// settings stay.
func (r *routerFlags) reload(c *config.Router, p *proxy.Proxy, log *slog.Logger) {
	now, err := config.LoadRouter(r.file, r.sets, r.engines)
	if err == nil {
		cfg := routerConfig(now)
		err = p.SetEngines(cfg.Prefill, cfg.Decode)
	}
	if err != nil {
		log.Error("SIGHUP: the engines stay as they were, because the configuration has a mistake",
			"file", r.file, "err", err)
		return
	}
	log.Info("SIGHUP: the engines are those of the file now", "file", r.file, "engines",
		len(now.Engines))
	if keys := c.Differs(now); len(keys) > 0 {
		log.Warn("SIGHUP: only engines change while the router runs; other settings need a restart",
			"file", r.file, "keys", keys)
	}
}

// routerConfig is the configuration for the router's package.
func routerConfig(c *config.Router) proxy.Config {
	cfg := proxy.Config{Mode: proxy.Mode(c.Mode), BodyBytes: int64(c.MaxBody),
		BodiesBytes: int64(c.MaxBodies), Times: proxy.Times{Slow: c.SlowAfter.D(),
			Silent: c.SilentAfter.D(), Prefill: c.PrefillTimeout.D(), FirstByte: c.FirstByteTimeout.D(),
			Drain: c.DrainTimeout.D()},
		Policy: c.Policy, TokenBytes: float64(c.TokenBytes), Replicate: c.ReplicateAfter, OTLP: c.OTLP,
		MaxPin: c.MaxPin.D(), Continue: c.Continue,
		TraceShare: c.TraceShare, Version: version.String()}
	if c.ReplicateAfter == 0 {
		cfg.Replicate = -1
	}
	for _, e := range c.Engines {
		x := proxy.Engine{URL: e.URL, Sidecar: e.Sidecar, Peer: e.Peer, Events: e.Events,
			Replay: e.Replay}
		if e.Role != config.RoleDecode {
			cfg.Prefill = append(cfg.Prefill, x)
		}
		if e.Role != config.RolePrefill {
			cfg.Decode = append(cfg.Decode, x)
		}
	}
	return cfg
}

const readyTemp = ".ready-*" // name of a ready file while it is written

// writeReady writes addresses to a file atomically, so that a script never reads a part of it.
func writeReady(path string, addrs map[string]string) error {
	if path == "" {
		return nil
	}
	b, err := json.Marshal(addrs)
	if err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), readyTemp)
	if err != nil {
		return fmt.Errorf("--ready-file %s: %w", path, err)
	}
	_, werr := tmp.Write(append(b, '\n'))
	if err := errors.Join(werr, tmp.Close()); err != nil {
		return errors.Join(fmt.Errorf("--ready-file %s: %w", path, err), os.Remove(tmp.Name()))
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return errors.Join(fmt.Errorf("--ready-file %s: %w", path, err), os.Remove(tmp.Name()))
	}
	return nil
}
