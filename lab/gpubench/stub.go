//go:build !cgo

package gpubench

import (
	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/sys/cuda"
)

func newOwnerCommand() *cobra.Command { return &cobra.Command{Use: "owner", Hidden: true} }

func (b *bench) within() error    { return cuda.ErrNotSupported }
func (b *bench) nvlink() error    { return cuda.ErrNotSupported }
func (b *bench) staged() error    { return cuda.ErrNotSupported }
func (b *bench) multipath() error { return cuda.ErrNotSupported }
