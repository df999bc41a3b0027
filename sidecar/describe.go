package sidecar

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/peer"
	"github.com/kvspray/kvspray/transfer"
)

// describeTimeout bounds a request for a peer's layout; the peer answers from memory.
const describeTimeout = 5 * time.Second

// Describe implements driver.Peers.
func (c *conversation) Describe(boot transfer.Boot, geometry [32]byte) {
	c.proc.Run(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, describeTimeout)
		defer cancel()
		b, err := c.mesh.Describe(ctx, boot, geometry, [32]byte{})
		switch {
		case err == nil:
			err = c.plans.Learn(geometry, b)
		case errors.Is(err, peer.ErrNoAnswer), errors.Is(err, peer.ErrUnknown):
			err = fmt.Errorf("%w: %w", exec.ErrNoAnswer, err)
		}
		if err != nil && !errors.Is(err, context.Canceled) {
			c.unlearned.Note(slog.LevelWarn, "layout of a peer", "peer", boot.String(), "geometry",
				fmt.Sprintf("%.8x", geometry), "err", err)
		}
		c.driver.Do(func(ex *exec.Exec, now exec.Instant) { ex.Described(now, boot, geometry, err) })
	})
}

// Compare implements driver.Peers: it finds the differences between a worker's cache and the cache
// of a peer's engine. It asks for the peer's description once.
func (c *conversation) Compare(x exec.Comparison) {
	c.proc.Run(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, describeTimeout)
		defer cancel()
		difference, err := c.difference(ctx, x)
		if err != nil {
			difference = "the caches of the two engines differ; the differences are unknown: " + err.Error()
		}
		c.driver.Do(func(ex *exec.Exec, now exec.Instant) { ex.Compared(now, x, difference) })
	})
}

func (c *conversation) difference(ctx context.Context, x exec.Comparison) (string, error) {
	theirs, known := c.descriptions.of(x.Fingerprint)
	if !known {
		b, err := c.mesh.Describe(ctx, x.Peer, x.Geometry, x.Fingerprint)
		if err != nil {
			return "", err //nolint:wrapcheck // names the peer and the hash
		}
		if theirs, err = c.descriptions.learn(x.Geometry, x.Fingerprint, b); err != nil {
			return "", err
		}
	}
	ours, err := c.plans.Registry().Describe(x.Worker.Layout)
	if err != nil {
		return "", err //nolint:wrapcheck // names the field
	}
	return sentence(ours.DiffAs(theirs, "at prefill", "at decode")), nil
}
