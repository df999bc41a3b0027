package sidecar

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/transport/stage"
)

// gpuTable is what was measured of the GPUs, nil where nobody did. A table that somebody named must be there; one that is not usable and lies
// where it lies by itself is only complained of.
func gpuTable(c *config.Config, log *slog.Logger) (*stage.Table, error) {
	path, named := c.Transports.GPU.TablePath()
	if path == "" {
		return nil, nil
	}
	t, err := stage.LoadTable(path)
	switch {
	case err == nil:
		log.Info("table of GPUs", "path", path, "models", t.String())
		return t, nil
	case named:
		return nil, fmt.Errorf("sidecar: transports.gpu.table: %w, or set it to off", err)
	case !errors.Is(err, fs.ErrNotExist):
		log.Warn("table of GPUs not used", "err", err)
	}
	return nil, nil
}

// CalibrateGPUs measures the GPUs of this host and adds them to the table at path, or to the one that nodes of this configuration read where path
// is empty. It returns where that is and what it says now.
func CalibrateGPUs(ctx context.Context, c *config.Config, path string, log *slog.Logger) (at string, table []byte, err error) {
	if path == "" {
		if path, _ = c.Transports.GPU.TablePath(); path == "" {
			return "", nil, errors.New("sidecar: calibrate: transports.gpu.table names no file: name one with --out, or set HOME")
		}
	}
	t, err := stage.LoadTable(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Warn("the old table is replaced", "err", err)
	}
	g, err := stage.New(stage.Config{Log: log})
	if err != nil {
		return "", nil, fmt.Errorf("sidecar: calibrate: %w", err)
	}
	fresh, err := stage.Calibrate(ctx, g)
	if err = errors.Join(err, g.Close()); err != nil {
		return "", nil, err
	}
	if t != nil { // other models, of hosts that share the file
		maps.Copy(t.GPUs, fresh.GPUs)
		fresh.GPUs = t.GPUs
	}
	if err := fresh.Save(path); err != nil {
		return "", nil, err
	}
	table, err = json.MarshalIndent(fresh, "", "  ")
	return path, table, err
}
