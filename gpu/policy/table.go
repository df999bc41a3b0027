package policy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// Table has the measurements of `kvspray calibrate` by model of GPU and driver (device.Modeler).
// Missing values are built in or measured when needed.
type Table struct {
	Version int               `json:"version"`
	GPUs    map[string]Limits `json:"gpus"`
}

// Limits are the measurements of one model. Zero: not measured.
type Limits struct {
	Measured   time.Time `json:"measured"`
	PackBlocks int       `json:"pack_blocks"` // thread blocks of the pack kernels
	// average piece from which copy engines move a list; at least 32 KiB
	DirectBytes uint64 `json:"direct_bytes"`
	// by number of links: bytes in flight from which copies use all of them
	EveryLink map[int]uint64 `json:"every_link_bytes"`
}

// Bounds of a table.
const (
	TableVersion   = 1
	maxTableBytes  = 1 << 20
	maxPackBlocks  = 1 << 16
	maxDirectBytes = 1 << 30
	maxLinks       = 64
	maxEveryLink   = 1 << 44
)

// LoadTable reads a table. The error wraps fs.ErrNotExist where there is no file.
func LoadTable(path string) (*Table, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("gpu: table of GPUs: %w", err)
	}
	defer func() { _ = f.Close() }()
	d := json.NewDecoder(io.LimitReader(f, maxTableBytes))
	d.DisallowUnknownFields()
	t := &Table{}
	if err := d.Decode(t); err != nil {
		return nil, fmt.Errorf("gpu: table of GPUs %s: %w; make a new one with kvspray calibrate", path,
			err)
	}
	if err := t.Check(); err != nil {
		return nil, fmt.Errorf("gpu: table of GPUs %s: %w; make a new one with kvspray calibrate", path,
			err)
	}
	return t, nil
}

// Check verifies the version and the bounds of all values.
func (t *Table) Check() error {
	if t.Version != TableVersion {
		return fmt.Errorf("version: %d, want %d", t.Version, TableVersion)
	}
	for model, l := range t.GPUs {
		within := func(field string, v, low, high uint64) error {
			if v != 0 && (v < low || v > high) {
				return fmt.Errorf("gpus[%q].%s: %d, want 0 or %d to %d", model, field, v, low, high)
			}
			return nil
		}
		err := errors.Join(within("pack_blocks", uint64(l.PackBlocks), 1, maxPackBlocks),
			within("direct_bytes", l.DirectBytes, 1, maxDirectBytes))
		for links, n := range l.EveryLink {
			err = errors.Join(err, within("every_link_bytes", uint64(links), 2, maxLinks),
				within(fmt.Sprintf("every_link_bytes[%d]", links), n, 1, maxEveryLink))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Save writes the whole table, or leaves the old file unchanged.
func (t *Table) Save(path string) (err error) {
	b, err := json.MarshalIndent(t, "", "  ")
	if err != nil {
		return fmt.Errorf("gpu: table of GPUs: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("gpu: table of GPUs: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".gpu-table-*")
	if err != nil {
		return fmt.Errorf("gpu: table of GPUs: %w", err)
	}
	_, err = f.Write(append(b, '\n'))
	err = errors.Join(err, f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		if rerr := os.Remove(f.Name()); !errors.Is(rerr, fs.ErrNotExist) {
			err = errors.Join(err, rerr)
		}
		return fmt.Errorf("gpu: table of GPUs: %w", err)
	}
	return nil
}

// Limits returns those of a model; none where t is nil or does not have it.
func (t *Table) Limits(model string) Limits {
	if t == nil {
		return Limits{}
	}
	return t.GPUs[model]
}

// String lists the models, for logs.
func (t *Table) String() string {
	var b bytes.Buffer
	for i, m := range t.Models() {
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(m)
	}
	return b.String()
}

// Models lists the models in order.
func (t *Table) Models() []string {
	var all []string
	for m := range t.GPUs {
		all = append(all, m)
	}
	slices.Sort(all)
	return all
}
