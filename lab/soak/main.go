// Command soak does for soak.py what needs the kernel's network and a plotting library:
//
//	soak rails RATE,RATE...    makes rails and does faults to them
//	soak report IN.json OUT.html    draws the curves of a run
//
// `rails` prints one line of JSON with a path to each of its two network namespaces, which live as
// long as this process, and their addresses. It then reads one fault a line from standard input, as
// `kvspray-bench rails --fault` takes them without the time ("rail0:down"), and answers each with
// "ok" or with an error. It ends with its standard input.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/kvspray/kvspray/lab/chart"
	"github.com/kvspray/kvspray/lab/railsbench/netrig"
	"github.com/kvspray/kvspray/lab/timeline"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 2 && args[0] == "rails":
		return rails(args[1], os.Stdin, os.Stdout)
	case len(args) == 3 && args[0] == "report":
		return report(args[1], args[2])
	}
	return fmt.Errorf("%q: want rails RATE,RATE... or report IN.json OUT.html", args)
}

// made is what rails prints first.
type made struct {
	Namespaces [2]string   `json:"namespaces"`
	Addresses  [2][]string `json:"addresses"`
}

func rails(rates string, in io.Reader, out io.Writer) error {
	var parsed []timeline.Rate
	for text := range strings.SplitSeq(rates, ",") {
		rate, err := timeline.ParseRate(text)
		if err != nil {
			return err
		}
		parsed = append(parsed, rate)
	}
	rig, err := netrig.New(parsed)
	if err != nil {
		return err
	}
	defer rig.Close()
	var m made
	for _, side := range []netrig.Side{netrig.Sender, netrig.Receiver} {
		var ns *os.File
		err := rig.Do(side, func() (err error) {
			ns, err = os.Open("/proc/thread-self/ns/net")
			return err
		})
		if err != nil {
			return err
		}
		defer func() { _ = ns.Close() }() // the namespace's last holder may be the process that goes
		m.Namespaces[side] = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), ns.Fd())
		for i := range rig.Rails() {
			m.Addresses[side] = append(m.Addresses[side], netrig.Addr(side, i).String())
		}
	}
	if err := json.NewEncoder(out).Encode(m); err != nil {
		return err
	}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		answer := "ok"
		if err := apply(rig, lines.Text()); err != nil {
			answer = strings.ReplaceAll(err.Error(), "\n", "; ")
		}
		if _, err := fmt.Fprintln(out, answer); err != nil {
			return err
		}
	}
	return lines.Err()
}

func apply(rig *netrig.Rig, line string) error {
	f, err := timeline.ParseFault("0s:" + line)
	if err != nil {
		return err
	}
	if f.Rail >= rig.Rails() {
		return fmt.Errorf("%s: there are %d rails", line, rig.Rails())
	}
	return rig.Apply(f)
}

func report(from, to string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	var page struct {
		Title  string        `json:"title"`
		Graphs []chart.Graph `json:"graphs"`
	}
	if err := json.Unmarshal(data, &page); err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	return errors.Join(chart.Graphs(out, page.Title, page.Graphs...), out.Close())
}
