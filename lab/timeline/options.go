package timeline

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/ui/usage"
)

// Bounds of Options.
const (
	MaxRails    = 16
	MaxFaults   = 256
	MinBlock    = 512
	MaxBlock    = 16 << 20
	BlockUnit   = 16 // bytes: a block has 16 tokens
	MaxLayers   = 32 // of a transfer: a power of two that divides its blocks
	MaxDuration = time.Hour
)

// Options are what the user asks for.
type Options struct {
	Rates    []Rate
	Block    int
	Total    int64         // bytes of one transfer
	Duration time.Duration // transfers of Total follow each other so long; 0: one cold and one warm
	Faults   []Fault       // by time
	JSON     string        // file, "-" for standard output, "" for none
	HTML     string
}

// Written is a result that goes to a file as JSON, or is printed for people.
type Written interface {
	Write(w io.Writer) error
	Print(w io.Writer) error
}

// Save writes a result to the places of the options: as JSON, as what html makes of it, and for
// people where neither goes to standard output.
func (o *Options) Save(r *Result, stdout io.Writer, html func(io.Writer, *Result) error) error {
	if err := save(o.HTML, stdout, func(w io.Writer) error { return html(w, r) }); err != nil {
		return fmt.Errorf("--html: %w", err)
	}
	return o.Store(stdout, r)
}

// Store writes a result that has no chart.
func (o *Options) Store(stdout io.Writer, r Written) error {
	if err := save(o.JSON, stdout, r.Write); err != nil {
		return fmt.Errorf("--json: %w", err)
	}
	if o.JSON == "-" || o.HTML == "-" {
		return nil
	}
	return r.Print(stdout)
}

// save writes to a file, to standard output for "-", and nowhere for "".
func save(path string, stdout io.Writer, write func(io.Writer) error) error {
	switch path {
	case "":
		return nil
	case "-":
		return write(stdout)
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	err = write(f)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

// Flags of both commands; Options reads them after the command line was parsed.
type Flags struct {
	cmd                 *cobra.Command
	rates, block, total string
	duration            time.Duration
	jsonFile, htmlFile  string
	faults              []string
}

// Defaults of the flags.
const (
	defaultRates = "2gbit,1gbit,500mbit,500mbit"
	defaultBlock = "16KiB"
	defaultTotal = "256MiB"
)

// AddFlags gives a command the flags.
func AddFlags(cmd *cobra.Command) *Flags {
	x := &Flags{cmd: cmd}
	f := cmd.Flags()
	f.StringVar(&x.rates, "rates", defaultRates, "the rails' rates, separated by commas")
	f.StringVar(&x.block, "block", defaultBlock, "bytes of a block of KV cache, a multiple of 16; "+
		"blocks lie scattered on both sides; pages of real models have 656, 9KiB or 28KiB")
	f.StringVar(&x.total, "total", defaultTotal, "bytes of a transfer: one is cold, one warm; the "+
		"default is rounded down to whole blocks")
	f.DurationVar(&x.duration, "duration", 0, "move transfers of "+defaultTotal+" one after the "+
		"other for so long, instead of --total")
	f.StringArrayVar(&x.faults, "fault", nil, "T:railN:kind; kinds: down, up, drop, ackdrop, "+
		"rate=1/20, flap=300ms, blackhole, heal; all for railN meets every rail; repeatable")
	f.StringVar(&x.jsonFile, "json", "", "write the result here; - for standard output")
	f.StringVar(&x.htmlFile, "html", "", "write a chart here")
	return x
}

// Options checks the flags. The error is a usage error that names the flag.
func (x *Flags) Options() (*Options, error) {
	o, err := x.options()
	return o, usage.Of(err)
}

func (x *Flags) options() (*Options, error) {
	o := &Options{Duration: x.duration, JSON: x.jsonFile, HTML: x.htmlFile}
	for _, s := range strings.Split(x.rates, ",") {
		r, err := ParseRate(strings.TrimSpace(s))
		if err != nil {
			return nil, fmt.Errorf("--rates: %w", err)
		}
		o.Rates = append(o.Rates, r)
	}
	block, err := ParseSize(x.block)
	if err != nil {
		return nil, fmt.Errorf("--block: %w", err)
	}
	o.Block = int(block)
	if o.Total, err = ParseSize(x.total); err != nil {
		return nil, fmt.Errorf("--total: %w", err)
	}
	if !x.cmd.Flags().Changed("total") && o.Block > 0 {
		o.Total = Whole(o.Total, o.Block)
	}
	if changed := x.cmd.Flags().Changed; changed("total") && changed("duration") {
		return nil, fmt.Errorf("--total %s and --duration %s: give one of them; --duration moves "+
			"transfers of %s", x.total, x.duration, defaultTotal)
	}
	if x.cmd.Flags().Changed("duration") && x.duration <= 0 {
		return nil, fmt.Errorf("--duration %s: must be positive", x.duration)
	}
	for _, s := range x.faults {
		f, err := ParseFault(s)
		if err != nil {
			return nil, fmt.Errorf("--fault: %w", err)
		}
		o.Faults = append(o.Faults, f)
	}
	Sort(o.Faults)
	if err := o.Check(); err != nil {
		return nil, err
	}
	for _, out := range []struct{ flag, path string }{{"--json", o.JSON}, {"--html", o.HTML}} {
		if err := Writable(out.path); err != nil {
			return nil, fmt.Errorf("%s: %w", out.flag, err)
		}
	}
	return o, nil
}

// Writable finds before a run what would lose its result after it. It leaves no file where
// there was none.
func Writable(path string) error {
	if path == "" || path == "-" {
		return nil
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err == nil {
		return errors.Join(f.Close(), os.Remove(path))
	}
	if errors.Is(err, os.ErrExist) {
		if f, err = os.OpenFile(path, os.O_WRONLY, 0); err == nil {
			return f.Close()
		}
	}
	return fmt.Errorf("%w: name a file that can be written, in a directory that is there", err)
}

// Whole is the largest number of bytes up to total that consists of whole blocks, in all layers
// where there are enough.
func Whole(total int64, block int) int64 {
	blocks := total / int64(block)
	if blocks >= MaxLayers {
		blocks -= blocks % MaxLayers
	}
	return blocks * int64(block)
}

// CheckBlock refuses block sizes that no cache has. The error has no flag.
func CheckBlock(block int) error {
	if block < MinBlock || block > MaxBlock || block%BlockUnit != 0 {
		return fmt.Errorf("%s: must be a multiple of %d bytes, from %s to %s", FormatSize(int64(block)),
			BlockUnit, FormatSize(MinBlock), FormatSize(MaxBlock))
	}
	return nil
}

// Check refuses options of which no run can be made. The error names the flag.
func (o *Options) Check() error {
	if err := CheckBlock(o.Block); err != nil {
		return fmt.Errorf("--block %w", err)
	}
	switch {
	case len(o.Rates) > MaxRails:
		return fmt.Errorf("--rates: %d rails: at most %d", len(o.Rates), MaxRails)
	case o.Total%int64(o.Block) != 0:
		return fmt.Errorf("--total %s: must be a multiple of --block %s, such as %s", FormatSize(o.Total),
			FormatSize(int64(o.Block)), FormatSize(max(Whole(o.Total, o.Block), int64(o.Block))))
	case o.Duration > MaxDuration:
		return fmt.Errorf("--duration %s: at most %s", o.Duration, MaxDuration)
	case len(o.Faults) > MaxFaults:
		return fmt.Errorf("--fault: %d of them: at most %d", len(o.Faults), MaxFaults)
	}
	for _, f := range o.Faults {
		if f.Rail >= len(o.Rates) {
			return fmt.Errorf("--fault %s: there are %d rails, rail0 to rail%d", f, len(o.Rates),
				len(o.Rates)-1)
		}
		if o.Duration > 0 && f.At >= o.Duration {
			return fmt.Errorf("--fault %s: never happens within --duration %s", f, o.Duration)
		}
	}
	if o.JSON == o.HTML && o.JSON != "" {
		return fmt.Errorf("--json %s and --html %s: only one can go there", o.JSON, o.HTML)
	}
	return nil
}
