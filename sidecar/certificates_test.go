package sidecar

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/metrics"
	"github.com/kvspray/kvspray/internal/testutil"
)

// A certificate that is replaced in place is loaded without a restart, and the metric has its end.
// One that cannot be used is reported once.
func TestCertificatesAreWatched(t *testing.T) {
	dir, now := t.TempDir(), time.Now()
	path := func(name string) string { return filepath.Join(dir, name) }
	ok(t, keys.WriteAuthority(path("ca.crt"), path("ca.key"), now, 48*time.Hour))
	issue := func(valid time.Duration) {
		ok(t, keys.WriteNode(keys.NodeFiles{CACert: path("ca.crt"), CAKey: path("ca.key"),
			Cert: path("new.crt"), Key: path("new.key")}, "n", []string{"127.0.0.1"}, now, valid))
		ok(t, os.Rename(path("new.key"), path("node.key")))
		ok(t, os.Rename(path("new.crt"), path("node.crt")))
	}
	issue(time.Hour)
	creds, err := keys.FromFiles(path("node.crt"), path("node.key"), path("ca.crt"), now)
	ok(t, err)
	var log testutil.Buffer
	reg := prometheus.NewRegistry()
	c := &conversation{creds: creds, metrics: metrics.New(reg),
		log: slog.New(slog.NewTextHandler(&log, nil))}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.watchCertificates(ctx, time.Millisecond)
	}()
	until(t, func() bool { return ends(t, reg).Sub(now.Add(time.Hour)).Abs() < 2*time.Second })
	ok(t, os.WriteFile(path("node.crt"), []byte("none"), 0o600))
	until(t, func() bool { return strings.Contains(log.String(), "certificates not read again") })
	issue(24 * time.Hour)
	until(t, func() bool { return ends(t, reg).Sub(now.Add(24*time.Hour)).Abs() < 2*time.Second })
	cancel()
	<-done
	if n := strings.Count(log.String(), "PEM data in certificate"); n != 1 {
		t.Errorf("%d reports of one problem: %s", n, log.String())
	}
	if !strings.Contains(log.String(), "certificates renewed") {
		t.Error(log.String())
	}
}

// ends is when the certificate ends, by the metric.
func ends(t *testing.T, reg *prometheus.Registry) time.Time {
	all, err := reg.Gather()
	ok(t, err)
	for _, f := range all {
		if f.GetName() == "kvspray_control_certificate_expiry_timestamp_seconds" {
			return time.Unix(int64(f.GetMetric()[0].GetGauge().GetValue()), 0)
		}
	}
	return time.Time{}
}
