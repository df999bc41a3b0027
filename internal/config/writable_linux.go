package config

import (
	"errors"
	"io/fs"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Writable returns why this process could not open or make a file for writing; nil if it could. It
// makes nothing.
func Writable(path string) error {
	err := access(path, unix.W_OK)
	if errors.Is(err, fs.ErrNotExist) {
		return access(filepath.Dir(path), unix.W_OK|unix.X_OK)
	}
	return err
}

// access checks with the user and capabilities of an open.
func access(path string, mode uint32) error {
	return unix.Faccessat(unix.AT_FDCWD, path, mode, unix.AT_EACCESS)
}
