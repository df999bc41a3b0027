package sidecar

import (
	"context"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/control/peer"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/parseblock"
	"github.com/kvspray/kvspray/sidecar/internal/segments"
	"github.com/kvspray/kvspray/transfer"
)

// newSegments makes the part that moves batches. Its worker starts with Run.
func (n *Node) newSegments() *segments.Segments {
	return segments.New(segments.Options{Self: n.boot, Node: n.cfg.Node, Endpoint: n.Endpoint,
		Root:     n.cfg.Segments.Root,
		Registry: parseblock.Default(), Leases: n.local, Events: n.driver.Handle,
		Send: n.conv.sendSegments, Connect: n.conv.Connect, Member: n.conv.memberEndpoint,
		Complete: n.complete, Log: n.log})
}

// sendSegments sends a frame about segments, also to this node.
func (c *conversation) sendSegments(to transfer.Boot, f *peerv1.ControlFrame) error {
	if to == c.boot {
		return c.segments.Handle(to, f)
	}
	c.dial.need(to) // a transfer follows
	c.metrics.Control(metrics.Out, frameName(f))
	return c.mesh.Send(to, f)
}

// memberEndpoint returns the endpoint of a member by the name of its node; empty: none has it.
func (c *conversation) memberEndpoint(node string) string {
	if c.mesh == nil || c.mesh.Cluster() == nil {
		return ""
	}
	for _, m := range c.mesh.Cluster().Members() {
		if m.Node == node {
			return m.Endpoint
		}
	}
	return ""
}

// segmentFrame takes a frame about segments. It returns false for others.
func (c *conversation) segmentFrame(from transfer.Boot, f *peerv1.ControlFrame) bool {
	switch f.Body.(type) {
	case *peerv1.ControlFrame_SegmentLocate, *peerv1.ControlFrame_SegmentLocated,
		*peerv1.ControlFrame_SegmentBatch, *peerv1.ControlFrame_SegmentCancel,
		*peerv1.ControlFrame_SegmentDone:
	default:
		return false
	}
	c.dial.need(from)
	if err := c.segments.Handle(from, f); err != nil {
		c.violates(from, exec.BadSegments, err)
	}
	return true
}

func (c *conversation) segmentPeer(in *peer.Peer) {
	c.segments.PeerUp(in.Boot, in.Node, in.Endpoint, in.Claimed, in.Features)
}

// leaveSegments ends batches. It runs before the sidecar stops serving peers. Idempotent.
func (n *Node) leaveSegments() {
	ctx, stop := context.WithTimeout(context.Background(), n.grace)
	defer stop()
	if err := n.segments.Stop(ctx); err != nil {
		n.log.Warn("stop", "err", err)
	}
}
