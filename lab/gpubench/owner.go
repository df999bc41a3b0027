//go:build cgo

package gpubench

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/internal/sys/cuda"
)

// newOwnerCommand is the other process: it stands for an engine that owns a GPU's memory and lends
// it by an IPC handle.
func newOwnerCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "owner DEVICE BYTES",
		Hidden: true,
		Args:   cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			dev, err := strconv.Atoi(args[0])
			if err != nil {
				return err
			}
			n, err := strconv.ParseUint(args[1], 10, 64)
			if err != nil {
				return err
			}
			if _, err := cuda.Open(); err != nil {
				return err
			}
			c, err := cuda.Device(dev).Retain()
			if err != nil {
				return err
			}
			p, err := c.Alloc(n)
			if err != nil {
				return err
			}
			h, err := c.ExportIPC(p)
			if err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), hex.EncodeToString(h[:]))
			_, err = io.Copy(io.Discard, cmd.InOrStdin()) // until the benchmark closes the pipe
			return err
		},
	}
}

// owner starts such a process and imports its memory into c.
func owner(c *cuda.Context, n uint64) (p cuda.Ptr, h cuda.IPCHandle, stop func() error, err error) {
	self, err := os.Executable()
	if err != nil {
		return 0, h, nil, err
	}
	cmd := exec.Command(self, "gpu", "owner", strconv.Itoa(int(c.Device)), strconv.FormatUint(n, 10))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return 0, h, nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, h, nil, err
	}
	if err := cmd.Start(); err != nil {
		return 0, h, nil, err
	}
	stop = func() error {
		if err := in.Close(); err != nil {
			return err
		}
		return cmd.Wait()
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return 0, h, nil, fmt.Errorf("owner of GPU %d: %w (%v)", c.Device, err, stop())
	}
	if k, err := hex.Decode(h[:], []byte(strings.TrimSpace(line))); err != nil || k != len(h) {
		return 0, h, nil, fmt.Errorf("owner of GPU %d: %q is no IPC handle (%v)", c.Device, line, stop())
	}
	p, err = c.OpenIPC(h)
	if err != nil {
		return 0, h, nil, fmt.Errorf("%w (%v)", err, stop())
	}
	return p, h, stop, nil
}
