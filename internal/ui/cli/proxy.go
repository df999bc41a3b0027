package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/ui/usage"
	"github.com/kvspray/kvspray/internal/version"
	"github.com/kvspray/kvspray/proxy"
)

func proxyCommand() *cobra.Command {
	var (
		prefill, peers, sidecars, decode []string
		decodeSidecars                   []string
		prefillEvents, decodeEvents      []string
		prefillReplay, decodeReplay      []string
		mode, listen, level, format      string
		policy, calibration, otlp        string
		tokenBytes, share                float64
		replicate                        int
		body, bodies                     int64
		times                            = proxy.DefaultTimes()
		ready                            string
	)
	cmd := &cobra.Command{
		Use:   "proxy",
		Short: "Route OpenAI-compatible requests to prefill and decode engines",
		Long: `Routes /v1/completions and /v1/chat/completions to one prefill engine and one decode engine
each, and streams the decode engine's answer back. Health is at /health, metrics are at /metrics.

  --mode concurrent     sends a request to both at once: the transfer overlaps the prefill. The
                        decode engine needs the endpoint of the prefill's sidecar: --prefill-peer,
                        or --prefill-sidecar to ask the sidecar for it.
  --mode prefill-first  sends a request to the prefill engine, then passes its kv_transfer_params
                        to the decode engine, like NIXL-style routers.

If the prefill engine fails, another one computes the prompt, or the decode engine itself. An engine
that fails, is slow or silent before the client has a byte is replaced by a better one.

  --policy least-loaded  takes the engines with the fewest requests in flight
  --policy auto          takes the engines with the lowest predicted time to the first token; the
                         decode engine may compute alone. docs/placement.md has the prediction.
  --policy cache         prefers the longest cached prefix
  --policy fetch, local  as auto, but always or never with a prefill engine

An engine whose URL is in --prefill and in --decode is one engine to a policy: it may fetch a cached
prefix from another one.

A policy guesses which engine has which prompts by what it sent there. With --decode-kv-events and
--prefill-kv-events it takes the engines' own events; docs/placement.md describes them.`,
		Example: `  kvspray proxy --prefill http://127.0.0.1:8100 --prefill-peer 127.0.0.1:7650 \
      --decode http://127.0.0.1:8200
  kvspray proxy --prefill http://p0:8000,http://p1:8000 \
      --prefill-sidecar http://p0:7651,http://p1:7651 --decode http://d0:8000`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := proxyConfig(prefill, peers, sidecars, decode)
			if err != nil {
				return usage.Of(err)
			}
			if !slices.Contains([]string{config.FormText, config.FormJSON}, format) {
				return usage.Of(fmt.Errorf("--log-format %q is not text or json", format))
			}
			var severity slog.Level
			if err := severity.UnmarshalText([]byte(level)); err != nil {
				return usage.Of(fmt.Errorf("--log-level %q is not debug, info, warn or error", level))
			}
			if _, _, err := net.SplitHostPort(listen); err != nil {
				return usage.Errorf("--listen %q: %w: write host:port, for instance 127.0.0.1:8000",
					listen, err)
			}
			if body < 1 {
				return usage.Errorf("--max-body %d: want a number of bytes, for instance %d", body,
					proxy.DefaultBodyBytes)
			}
			if bodies/proxy.HeldBodies <= body {
				return usage.Errorf("--max-bodies %d: want more than %d times --max-body, which is %d: the "+
					"router holds a body so many times", bodies, proxy.HeldBodies, body)
			}
			if err := checkTimes(&times); err != nil {
				return err
			}
			if err := readyFile(ready); err != nil {
				return err
			}
			if cfg.Calibration, err = readCalibration(calibration); err != nil {
				return err
			}
			if !(share > 0 && share <= 1) { // NaN, too
				return usage.Errorf("--trace-share %v: want more than 0 and at most 1, for instance 0.1", share)
			}
			cfg.OTLP, cfg.TraceShare, cfg.Version = otlp, share, version.String()
			if cfg.PrefillEvents, err = kvEvents("prefill", prefillEvents, prefillReplay); err != nil {
				return usage.Of(err)
			}
			if cfg.DecodeEvents, err = kvEvents("decode", decodeEvents, decodeReplay); err != nil {
				return usage.Of(err)
			}
			cfg.Policy, cfg.DecodeSidecars, cfg.TokenBytes = policy, decodeSidecars, tokenBytes
			if cfg.Replicate = replicate; replicate < 0 {
				return usage.Errorf("--replicate-after %d: want a number of requests, or 0 for never",
					replicate)
			} else if replicate == 0 {
				cfg.Replicate = -1
			}
			log, flush := openLog(cmd.ErrOrStderr(), severity, format)
			defer flush()
			reg := prometheus.NewRegistry()
			reg.MustRegister(collectors.NewGoCollector(),
				collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
			cfg.Mode, cfg.BodyBytes, cfg.Log, cfg.Registry = proxy.Mode(mode), body, log, reg
			cfg.BodiesBytes, cfg.Times = bodies, times
			p, err := proxy.New(cfg)
			if err != nil {
				return usage.Of(err)
			}
			var lc net.ListenConfig
			l, err := lc.Listen(cmd.Context(), "tcp", listen)
			if err != nil {
				return fmt.Errorf("proxy: listen: %w; give --listen a free host:port", err)
			}
			log.Info("proxy is listening", "address", l.Addr().String(), "mode", mode, "policy", policy,
				"prefill", len(cfg.Prefill), "decode", len(cfg.Decode))
			if err := writeReady(ready, map[string]string{"http": l.Addr().String()}); err != nil {
				return errors.Join(err, l.Close())
			}
			return p.Serve(cmd.Context(), l)
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&prefill, "prefill", nil, "URLs of prefill engines; repeat or separate by commas")
	f.StringSliceVar(&peers, "prefill-peer", nil, "host:port of each prefill engine's sidecar (its "+
		"peer.listen), in the order of --prefill")
	f.StringSliceVar(&sidecars, "prefill-sidecar", nil, "URL of each prefill engine's sidecar (its "+
		"http.listen), to obtain or check its --prefill-peer, and to see that it leaves (kvspray drain)")
	f.StringSliceVar(&decode, "decode", nil, "URLs of decode engines")
	f.StringSliceVar(&decodeSidecars, "decode-sidecar", nil, "URL of each decode engine's sidecar "+
		"(its http.listen), to see that it leaves (kvspray drain); a policy learns the rates to it")
	for _, x := range []struct {
		role           string
		events, replay *[]string
	}{{"prefill", &prefillEvents, &prefillReplay}, {"decode", &decodeEvents, &decodeReplay}} {
		f.StringSliceVar(x.events, x.role+"-kv-events", nil, "endpoint of each "+x.role+" engine's KV "+
			"events (endpoint of its --kv-events-config), for instance tcp://host:5557; empty for an "+
			"engine without; a policy then takes its hits from them")
		f.StringSliceVar(x.replay, x.role+"-kv-replay", nil, "endpoint of each "+x.role+" engine's "+
			"replay of KV events (its replay_endpoint)")
	}
	f.StringVar(&policy, "policy", proxy.DefaultPolicy, strings.Join(proxy.Policies(), ", "))
	f.StringVar(&calibration, "calibration", "", "file of 'kvspray place calibrate' with lines "+
		"prefill and link, for a policy's first predictions")
	f.IntVar(&replicate, "replicate-after", proxy.DefaultReplicate, "requests in flight at each "+
		"engine that has a prefix, after which a policy gives another engine a copy; 0: never")
	f.Float64Var(&tokenBytes, "token-bytes", 131072, "KV cache of one token in bytes, all layers and "+
		"ranks, for a policy")
	f.StringVar(&mode, "mode", string(proxy.Concurrent), "concurrent or prefill-first")
	f.StringVar(&listen, "listen", "127.0.0.1:8000", "host:port to serve on; port 0 takes a free one")
	f.Int64Var(&body, "max-body", proxy.DefaultBodyBytes, "largest request body, in bytes")
	f.Int64Var(&bodies, "max-bodies", proxy.DefaultBodiesBytes, "bytes of all request bodies in "+
		"flight, with their copies; others get 503")
	for _, x := range timeFlags(&times) {
		f.DurationVar(x.value, x.name, *x.value, x.help)
	}
	f.StringVar(&otlp, "otlp", "", "URL of an OpenTelemetry collector for spans of requests, by OTLP "+
		"over HTTP, for instance http://127.0.0.1:4318")
	f.Float64Var(&share, "trace-share", 1, "share of the requests without a traceparent header that "+
		"are traced, for --otlp")
	f.StringVar(&level, "log-level", config.LevelInfo, "debug, info, warn or error")
	f.StringVar(&format, "log-format", config.FormText, "text or json")
	f.StringVar(&ready, "ready-file", "", "file for the bound address as JSON, written once "+
		"listening; for scripts that use port 0")
	return cmd
}

type timeFlag struct {
	name  string
	value *time.Duration
	help  string
}

func timeFlags(t *proxy.Times) []timeFlag {
	return []timeFlag{
		{"slow-after", &t.Slow, "time without an answer to a health check after which an engine is " +
			"slow: it gets requests only if no engine is better"},
		{"silent-after", &t.Silent, "time without an answer to a health check and without a byte of " +
			"any request after which an engine is silent: a better engine takes over its requests that " +
			"have no byte yet; after five times as long it is down"},
		{"prefill-timeout", &t.Prefill, "longest wait for a prefill engine's answer"},
		{"first-byte-timeout", &t.FirstByte, "longest wait for the first byte of a decode engine, or " +
			"for its whole answer if that is no stream"},
		{"drain-timeout", &t.Drain, "longest wait for requests in flight at the end of the router, " +
			"which then cuts them"},
	}
}

func checkTimes(t *proxy.Times) error {
	for _, x := range timeFlags(t) {
		if *x.value <= 0 {
			return usage.Errorf("--%s %s: want more than 0, for instance 30s", x.name, *x.value)
		}
	}
	if t.Silent < t.Slow {
		return usage.Errorf("--silent-after %s is shorter than --slow-after %s", t.Silent, t.Slow)
	}
	return nil
}

func proxyConfig(prefill, peers, sidecars, decode []string) (proxy.Config, error) {
	cfg := proxy.Config{Decode: decode}
	for _, l := range []struct {
		flag string
		list []string
	}{{"--prefill-peer", peers}, {"--prefill-sidecar", sidecars}} {
		if len(l.list) != 0 && len(l.list) != len(prefill) {
			return cfg, fmt.Errorf("%s names %d sidecars for %d prefill engines; pass one for each, in "+
				"the same order", l.flag, len(l.list), len(prefill))
		}
	}
	for i, url := range prefill {
		b := proxy.Prefill{URL: url}
		if len(peers) > 0 {
			b.Peer = peers[i]
		}
		if len(sidecars) > 0 {
			b.Sidecar = sidecars[i]
		}
		cfg.Prefill = append(cfg.Prefill, b)
	}
	return cfg, nil
}

// kvEvents joins the endpoints of a role's engines.
func kvEvents(role string, events, replay []string) ([]proxy.Events, error) {
	if len(replay) != 0 && len(replay) != len(events) {
		return nil, fmt.Errorf("--%s-kv-replay names %d endpoints, and --%s-kv-events %d; pass one for "+
			"each engine, in the same order", role, len(replay), role, len(events))
	}
	var list []proxy.Events
	for i, e := range events {
		x := proxy.Events{Endpoint: e}
		if len(replay) > 0 {
			x.Replay = replay[i]
		}
		list = append(list, x)
	}
	return list, nil
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
