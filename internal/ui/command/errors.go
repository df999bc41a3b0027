package command

import (
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/ui/usage"
)

// explainUsage makes each command below c report the correct form for wrong arguments or flags.
// Commands describe themselves by Use, Args, Example and flags; only this file makes the messages.
func explainUsage(c *cobra.Command) {
	check := c.Args
	if check == nil {
		check = cobra.NoArgs
	}
	c.Args = func(c *cobra.Command, args []string) error {
		if check(c, args) != nil {
			return usage.Of(argumentError(c, args))
		}
		return nil
	}
	c.SetFlagErrorFunc(func(c *cobra.Command, err error) error { return usage.Of(flagError(c, err)) })
	for _, sub := range c.Commands() {
		explainUsage(sub)
	}
}

// explainHelp does the same for cobra's help command, which would ignore unknown arguments.
func explainHelp(root *cobra.Command) {
	root.InitDefaultHelpCmd()
	help, _, _ := root.Find([]string{"help"}) // it was just made
	help.Args = func(_ *cobra.Command, args []string) error {
		if c, rest, _ := root.Find(args); len(rest) > 0 { // rest starts with the unknown word
			return usage.Of(unknownCommand(c, rest[0]))
		}
		return nil
	}
}

func argumentError(c *cobra.Command, args []string) error {
	takes := strings.Fields(c.Use)[1:]
	switch {
	case c.HasAvailableSubCommands():
		return unknownCommand(c, args[0])
	case len(c.ValidArgs) > 0:
		for _, a := range args {
			if !slices.Contains(c.ValidArgs, a) {
				return fmt.Errorf("%s: unknown argument %q: want any of %s, or none for all; %s", name(c), a,
					strings.Join(c.ValidArgs, ", "), typed(c))
			}
		}
		return fmt.Errorf("%s: %q: pass each argument once; %s", name(c), args, typed(c))
	case len(takes) == 0:
		if flag := meant(c, args[0]); flag != "" {
			return fmt.Errorf("%s takes no arguments, only flags: for %q type: %s --%s %s", name(c), args[0],
				c.CommandPath(), flag, args[0])
		}
		return fmt.Errorf("%s takes no arguments, only flags, and got %q; %s", name(c), args[0], typed(c))
	}
	got := "none"
	if len(args) > 0 {
		got = fmt.Sprintf("%d: %q", len(args), args)
	}
	return fmt.Errorf("%s takes %d arguments, %s, and got %s; %s", name(c), len(takes),
		strings.Join(takes, " "), got, typed(c))
}

// name is the command without the program's name, with which errors begin.
func name(c *cobra.Command) string {
	return strings.TrimPrefix(c.CommandPath(), c.Root().Name()+" ")
}

// typed shows how to write the command: its form, and its first example.
func typed(c *cobra.Command) string {
	form := "type: " + c.UseLine()
	if example, _, _ := strings.Cut(strings.TrimSpace(c.Example), "\n"); example != "" {
		form += ", for instance: " + example
	}
	return form
}

func unknownCommand(c *cobra.Command, typed string) error {
	if c.SuggestionsMinimumDistance <= 0 {
		c.SuggestionsMinimumDistance = 2
	}
	mean := ""
	if near := c.SuggestionsFor(typed); len(near) > 0 {
		mean = fmt.Sprintf("Did you mean %s? ", strings.Join(near, " or "))
	}
	var names []string
	for _, sub := range c.Commands() {
		if sub.IsAvailableCommand() {
			names = append(names, sub.Name())
		}
	}
	return fmt.Errorf("unknown command %q for %q. %sThere are %s", typed, c.CommandPath(), mean,
		strings.Join(names, ", "))
}

// meant guesses the flag of a value in the place of an argument; empty: unknown.
func meant(c *cobra.Command, arg string) string {
	has := func(flag string) bool { return c.Flags().Lookup(flag) != nil }
	_, _, address := net.SplitHostPort(strings.TrimPrefix(arg, "http://"))
	isURL := strings.Contains(arg, "://")
	ext := filepath.Ext(arg)
	switch {
	case has("config") && (ext == ".yaml" || ext == ".yml"):
		return "config"
	case has("model"):
		return "model"
	case has("set") && strings.Contains(arg, "="):
		return "set"
	case has("http") && !has("listen") && address == nil:
		return "http"
	case has("out"):
		return "out"
	case has("config") && !isURL && strings.ContainsRune(arg, filepath.Separator):
		return "config"
	}
	return ""
}

// forms describes the values of each type of flag.
var forms = map[string]string{
	"duration": "a time such as 500ms, 10s or 2m",
	"int":      "a whole number",
	"int64":    "a whole number",
	"uint64":   "a whole number that is not negative",
	"bool":     "true or false, as --NAME=true",
}

func flagError(c *cobra.Command, err error) error {
	if rest := c.Flags().Args(); c.HasAvailableSubCommands() && len(rest) > 0 {
		return unknownCommand(c, rest[0]) // the flag belongs to that command
	}
	var unknown *pflag.NotExistError
	var bare *pflag.ValueRequiredError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown):
		if near := nearestFlag(c, unknown.GetSpecifiedName()); near != "" &&
			unknown.GetSpecifiedShortnames() == "" {
			return fmt.Errorf("%s: %w. Did you mean --%s?", name(c), err, near)
		}
	case errors.As(err, &bare):
		return fmt.Errorf("%s: %w: %s", name(c), err, bare.GetFlag().Usage)
	case errors.As(err, &invalid):
		f := invalid.GetFlag()
		if want, ok := forms[f.Value.Type()]; ok {
			return fmt.Errorf("--%s %q: want %s: %s", f.Name, invalid.GetValue(), strings.ReplaceAll(want,
				"NAME", f.Name), f.Usage)
		}
	}
	return err
}

// nearestFlag is the flag of c closest to a name, or the only one with that prefix.
func nearestFlag(c *cobra.Command, typed string) string {
	var all, begin []string
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden {
			return
		}
		all = append(all, f.Name)
		if strings.HasPrefix(f.Name, typed) {
			begin = append(begin, f.Name)
		}
	})
	if len(begin) == 1 {
		return begin[0]
	}
	return config.Nearest(typed, all)
}
