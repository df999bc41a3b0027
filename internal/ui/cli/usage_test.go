package cli

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/ui/command"
)

// A wrong argument or flag has the exit code of usage errors, and its error has the correct form.
func TestUsageErrors(t *testing.T) {
	const engines = "type: kvspray layout check PREFILL DECODE [flags], for instance: kvspray " +
		"layout check http://127.0.0.1:7651 http://127.0.0.1:7661"
	for args, want := range map[string][]string{
		"layout check":       {"takes 2 arguments, PREFILL DECODE, and got none", engines},
		"layout check x":     {`got 1: ["x"]`, engines},
		"layout check x y z": {`got 3: ["x" "y" "z"]`, engines},
		"config check kv.yaml": {"takes no arguments, only flags", "type: kvspray config check " +
			"--config kv.yaml"},
		"config check ./kv":           {"type: kvspray config check --config ./kv"},
		"serve peer.listen=x:1":       {"type: kvspray serve --set peer.listen=x:1"},
		"calibrate gpus.json":         {"type: kvspray calibrate --out gpus.json"},
		"status 127.0.0.1:7661":       {"type: kvspray status --http 127.0.0.1:7661"},
		"layout explain llama-3.1-8b": {"type: kvspray layout explain --model llama-3.1-8b"},
		"doctor x":                    {`got "x"`, "type: kvspray doctor [flags]"},
		"proxy http://a:1":            {"for instance: kvspray proxy --engine url=http://"},
		"help keygen nope":            {`unknown command "nope" for "kvspray keygen"`},
		"try --keep":                  {"pip install 'kvspray[vllm]'", "type: kvspray try --keep"},
		"keygen me":                   {"There are ca, cluster, node"},
		"drain --timeout 4s":          {"--notice 5s, --timeout 4s", "no shorter timeout"},
		"serv --config x":             {`unknown command "serv"`, "Did you mean serve?"},
		"help bogus":                  {`unknown command "bogus"`, "There are bugreport"},
		"status --intervall 1s":       {"unknown flag: --intervall. Did you mean --interval?"},
		"doctor --conf x":             {"Did you mean --config?"},
		"status --interval 3":         {`--interval "3"`, "500ms, 10s or 2m"},
		"status --watch=maybe":        {`--watch "maybe"`, "true or false, as --watch=true"},
		"store get 12":                {"made of a tenant's text", "--verify"},
		"store get --verify 12":       {`--namespace ""`, "64 hexadecimal digits"},
		"store ls --namespace zz":     {`--namespace "zz"`},
		"store stat --output xml":     {`"xml"`, "text or json"},
		"store fsck":                  {"names no store.disk", "--disk PATH"},
		"store drain --timeout 0s":    {"--timeout 0s"},
		"load":                        {"SOURCE, and got none", "kvspray load /models/step-1200"},
		"load /m --engine localhost":  {`--engine "localhost"`, "http://HOST:PORT"},
		"load /m --level 3":           {"--level 3", "want 1, or 2"},
		"serve --config":              {"flag needs an argument: --config", "YAML"},
	} {
		code, out, errs := run(strings.Fields(args)...)
		if code != command.ExitUsage || out != "" {
			t.Errorf("%s: exit code %d, and it printed %q", args, code, out)
		}
		for _, w := range append(want, "--help'") {
			if !strings.Contains(errs, w) {
				t.Errorf("%s: %q is not in %s", args, w, errs)
			}
		}
	}
}

// Every command refuses surplus arguments with the correct form, in none of cobra's own words.
func TestEveryCommandExplains(t *testing.T) {
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		for _, sub := range c.Commands() {
			walk(sub)
		}
		if c.Hidden {
			return
		}
		code, out, errs := run(append(strings.Fields(c.CommandPath())[1:], "no-such-argument",
			"none", "none")...)
		if code != command.ExitUsage || out != "" {
			t.Errorf("%s: exit code %d, and it printed %q", c.CommandPath(), code, out)
		}
		if !strings.Contains(errs, "type: kvspray") && !strings.Contains(errs, "There are ") ||
			!strings.Contains(errs, "no-such-argument") {
			t.Errorf("%s: the correct form is not in %s", c.CommandPath(), errs)
		}
	}
	walk(newRoot())
}

func TestVersionFlag(t *testing.T) {
	_, want, _ := run("version")
	if code, out, errs := run("--version"); code != command.ExitOK || out != want || want == "" {
		t.Errorf("exit code %d: %q and %q, want %q", code, out, errs, want)
	}
}
