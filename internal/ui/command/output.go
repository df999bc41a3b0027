package command

import (
	"errors"

	"github.com/spf13/cobra"
)

// OutputFlag adds --output, and --json as its short form, to a command that reads.
func OutputFlag(cmd *cobra.Command, asJSON *bool) {
	cmd.Flags().Var((*output)(asJSON), "output", "text or json")
	cmd.Flags().BoolVar(asJSON, "json", false, "short for --output json")
	// The values are few, and files are none of them.
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"text", "json"},
		cobra.ShellCompDirectiveNoFileComp))
}

// output is the form of what a command prints: true is JSON.
type output bool

func (o *output) String() string {
	if o != nil && bool(*o) {
		return "json"
	}
	return "text"
}

func (o *output) Set(s string) error {
	if s != "text" && s != "json" {
		return errors.New("want text or json")
	}
	*o = s == "json"
	return nil
}

func (*output) Type() string { return "form" }
