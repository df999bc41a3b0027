package sidecar

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"

	"github.com/kvspray/kvspray/gpu"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/config"
)

// gpuTable returns the measurements of the GPUs, nil without any. A table that the configuration
// names must exist; an unusable table at the default path only causes a warning.
func gpuTable(c *config.Config, log *slog.Logger) (*policy.Table, error) {
	path, named := c.Transports.GPU.TablePath()
	if path == "" {
		return nil, nil
	}
	t, err := policy.LoadTable(path)
	switch {
	case err == nil:
		log.Info("table of GPUs", "path", path, "models", t.String())
		return t, nil
	case named:
		return nil, fmt.Errorf("sidecar: transports.gpu.calibration: %w, or set it to off", err)
	case !errors.Is(err, fs.ErrNotExist):
		log.Warn("table of GPUs not used", "err", err)
	}
	return nil, nil
}

// CalibrateGPUs measures the GPUs of this host and adds them to the table at path, or to the
// default table if path is empty. It returns the path and the table.
func CalibrateGPUs(ctx context.Context, c *config.Config, path string, log *slog.Logger) (at string,
	table []byte, err error) {
	if path == "" {
		if path, _ = c.Transports.GPU.TablePath(); path == "" {
			return "", nil, errors.New("sidecar: calibrate: transports.gpu.calibration names no file: " +
				"name one with --out, or set HOME")
		}
	}
	t, err := policy.LoadTable(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		log.Warn("the old table will be replaced", "err", err)
	}
	g, err := gpu.New(gpu.Config{Log: log})
	if err != nil {
		return "", nil, fmt.Errorf("sidecar: calibrate: %w", err)
	}
	fresh, err := gpu.Calibrate(ctx, g)
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
