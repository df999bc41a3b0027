// Command chartrender prints the documents of a release, as helm template does, for tests that have
// no helm.
//
//	chartrender CHART RELEASE NAMESPACE VALUES
package main

import (
	"fmt"
	"os"
	"strings"

	"github.com/kvspray/kvspray/deploy/charttest"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "chartrender:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 4 {
		return fmt.Errorf("%d arguments: want CHART RELEASE NAMESPACE VALUES", len(args))
	}
	values, err := os.ReadFile(args[3])
	if err != nil {
		return err
	}
	docs, err := charttest.Render(args[0], args[1], args[2], values)
	if err != nil {
		return err
	}
	_, err = fmt.Println("---\n" + strings.Join(docs, "---\n"))
	return err
}
