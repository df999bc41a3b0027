package sidecar

import (
	"log/slog"
	"strings"
	"testing"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/testutil"
)

// However often a peer violates the protocol, the log has one line for each kind of violation, and
// the metric counts all.
func TestViolationsAreLoggedOnce(t *testing.T) {
	const times = 100
	l := &testutil.Log{}
	cfg := testConfig(t, func(c *config.Config) { c.Transports.Order = []string{"tcp"} })
	n := startLog(t, cfg, slog.New(slog.NewTextHandler(l, nil)))
	other := start(t, func(c *config.Config) { c.Transports.Order = []string{"tcp"} })
	n.conv.Connect(other.Endpoint())
	until(t, func() bool { return n.dial.has(other.Boot()) })
	for range times {
		n.conv.frame(other.Boot(), &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Grant{
			Grant: &peerv1.Grant{}}})
		n.conv.frame(other.Boot(), &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Commit{
			Commit: &peerv1.Commit{}}})
		n.conv.frame(other.Boot(), &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Credit{
			Credit: &peerv1.Credit{Transport: "tcp", Rail: "r", Bytes: 1 << 60}}})
		n.conv.frame(other.Boot(), &peerv1.ControlFrame{Body: &peerv1.ControlFrame_Rails{
			Rails: &peerv1.Rails{ControlAddresses: []string{"nowhere"}}}})
	}
	for reason, text := range map[string]string{"key": "grant: key: xfer has 0 bytes",
		"lease": "lease: boot has 0 bytes", "credit": "credit for rail",
		"address": "control addresses of"} {
		if got := strings.Count(l.String(), text); got != 1 {
			t.Errorf("%q was logged %d times, want once: %s", text, got, l)
		}
		if got := value(t, n, "kvspray_control_violations_total", "reason", reason); got != times {
			t.Errorf("%g times another %s was counted, want %d", got, reason, times)
		}
	}
}
