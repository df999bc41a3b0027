package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/redact"
	"github.com/kvspray/kvspray/internal/ui/ask"
	"github.com/kvspray/kvspray/internal/ui/command"
	"github.com/kvspray/kvspray/internal/ui/explain"
	"github.com/kvspray/kvspray/internal/ui/usage"
)

func layoutCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "layout",
		Short: "Explain KV cache layouts, and compare those of two engines", Args: cobra.NoArgs,
		RunE: command.Help}
	cmd.AddCommand(layoutExplainCommand(), layoutCheckCommand())
	return cmd
}

func layoutExplainCommand() *cobra.Command {
	var model, engine, toEngine string
	var tokens int
	var asJSON bool
	var prefill, decode explain.Side
	cmd := &cobra.Command{
		Use:   "explain",
		Short: "Bytes per token, the page drawn, and the plan between prefill and decode",
		Long: "Bytes per token, the page drawn, and the plan between prefill and decode.\n\n" +
			"The model is a config.json, as in a model's directory, or one of: " +
			strings.Join(explain.Presets(), ", ") + ".\n" +
			"Decode options default to the values of prefill.\n\n" +
			"With --engine (and --to-engine) it explains the layouts of running engines; ENGINE is the " +
			"HTTP address of a sidecar, followed\n" +
			"by #ID if several engines are registered there.",
		Example: "  kvspray layout explain --model llama-3.1-8b --tp 2 --to-tp 1\n" +
			"  kvspray layout explain --model ./config.json --block 16 --to-block 64 --order packed_hnd",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f := cmd.Flags()
			if engine != "" || toEngine != "" {
				return explainEngines(cmd, engine, toEngine, model, tokens, asJSON)
			}
			m, err := readModel(model)
			if err != nil {
				return usage.Of(err)
			}
			if !f.Changed("to-block") {
				decode.Block = prefill.Block
			}
			if !f.Changed("to-tp") {
				decode.TP = prefill.TP
			}
			if !f.Changed("to-order") {
				decode.Order = prefill.Order
			}
			if !f.Changed("dtype") {
				prefill.DType = m.DType()
			}
			if !f.Changed("to-dtype") {
				decode.DType = prefill.DType
			}
			r, err := explain.Explain(m, prefill, decode, tokens)
			if err != nil {
				return usage.Of(err)
			}
			return writeReport(cmd.OutOrStdout(), r, asJSON)
		},
	}
	f := cmd.Flags()
	f.StringVar(&model, "model", "", "config.json of the model, or the name of a preset")
	f.StringVar(&engine, "engine", "", "explain the layout of the engine at this sidecar")
	f.StringVar(&toEngine, "to-engine", "", "sidecar of the decode engine, if it is another one")
	f.IntVar(&tokens, "tokens", 32768, "length of the planned prompt")
	command.OutputFlag(cmd, &asJSON)
	f.IntVar(&prefill.Block, "block", 16, "tokens of a block at the prefill engine")
	f.IntVar(&prefill.TP, "tp", 1, "tensor parallel size of the prefill engine")
	f.StringVar(&prefill.Order, "order", explain.Orders[0],
		"order of its attention pages: "+strings.Join(explain.Orders, ", "))
	f.StringVar(&prefill.DType, "dtype", "", "dtype of its cache, bf16 or fp8 (default bf16, and "+
		"fp8 for DeepSeek-V4)")
	f.IntVar(&decode.Block, "to-block", 0, "tokens of a block at the decode engine")
	f.IntVar(&decode.TP, "to-tp", 0, "tensor parallel size of the decode engine")
	f.StringVar(&decode.Order, "to-order", "", "order of its attention pages")
	f.StringVar(&decode.DType, "to-dtype", "", "dtype of its cache")
	return cmd
}

func explainEngines(cmd *cobra.Command, from, to, model string, tokens int, asJSON bool) error {
	if model != "" {
		return usage.Of(errors.New("--model and --engine: pass one of them"))
	}
	if from == "" {
		return usage.Of(
			errors.New("--to-engine without --engine: name the prefill engine's sidecar as well"))
	}
	if to == "" {
		to = from
	}
	p, err := fetchEngine(cmd.Context(), from)
	if err != nil {
		return err
	}
	d, err := fetchEngine(cmd.Context(), to)
	if err != nil {
		return err
	}
	r, err := explain.ExplainEngines(p, d, tokens)
	if err != nil {
		return err
	}
	return writeReport(cmd.OutOrStdout(), r, asJSON)
}

func writeReport(w io.Writer, r *explain.Report, asJSON bool) error {
	if asJSON {
		return r.WriteJSON(w)
	}
	return r.WriteText(w)
}

func readModel(name string) (*explain.Model, error) {
	if name == "" {
		return nil, errors.New("--model is missing: pass a config.json, its directory, or one of " +
			strings.Join(explain.Presets(), ", ") + "; or pass --engine for a running sidecar")
	}
	if st, err := os.Stat(name); err == nil && st.IsDir() {
		name = filepath.Join(name, "config.json") // a model's directory
	}
	if !strings.ContainsAny(name, "/.") || !strings.HasSuffix(name, ".json") {
		return explain.Preset(name)
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("--model: %w; pass a config.json, a model's directory, or one of %s", err,
			strings.Join(explain.Presets(), ", "))
	}
	defer func() { _ = f.Close() }() // read only
	b, err := io.ReadAll(io.LimitReader(f, explain.MaxConfigBytes+1))
	if err != nil {
		return nil, err
	}
	return explain.ParseConfig(name, b)
}

// errDiffer is the result of layout check, which has printed the details.
var errDiffer = errors.New("KV cannot be moved between these engines")

func layoutCheckCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "check PREFILL DECODE",
		Short: "Compare the engines of two running sidecars: whether and how KV can be moved",
		Long: "Compare the layouts registered at two running sidecars. PREFILL and DECODE are the " +
			"addresses of their HTTP (http.listen).",
		Example: "  kvspray layout check http://127.0.0.1:7651 http://127.0.0.1:7661",
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			var engines [2]*explain.Engine
			for i, a := range args {
				var err error
				if engines[i], err = fetchEngine(cmd.Context(), a); err != nil {
					return err
				}
			}
			v, err := explain.Check(engines[0], engines[1])
			if err != nil {
				return err
			}
			if asJSON {
				e := json.NewEncoder(cmd.OutOrStdout())
				e.SetIndent("", "  ")
				err = e.Encode(v)
			} else {
				err = v.WriteText(cmd.OutOrStdout())
			}
			if err == nil && !v.OK() {
				err = errDiffer
			}
			return err
		},
	}
	command.OutputFlag(cmd, &asJSON)
	return cmd
}

// fetchTimeout bounds a request to a sidecar, which answers from memory.
const fetchTimeout = 10 * time.Second

func fetchEngine(ctx context.Context, address string) (*explain.Engine, error) {
	address, engine, _ := strings.Cut(address, "#")
	if !strings.Contains(address, "://") {
		address = "http://" + address
	}
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(address,
		"/")+"/v1/layouts", nil)
	if err != nil {
		return nil, usage.Of(errors.New(redact.URLs(err.Error())))
	}
	shown := redact.URL(address)
	resp, err := ask.Send(q)
	if err != nil {
		return nil, fmt.Errorf("%w: is a sidecar running there? Name its http.listen, host:port "+
			"(default 127.0.0.1:7651)", err)
	}
	defer func() { _ = resp.Body.Close() }() // nothing can be lost
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s: is it a sidecar's http.listen, of this version?", shown,
			resp.Status)
	}
	return explain.ParseEngine(shown, engine, io.LimitReader(resp.Body, explain.MaxEngineBytes))
}
