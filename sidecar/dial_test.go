package sidecar

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/kvspray/kvspray/control/exec"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/internal/wire"
)

// Two sidecars that meet open their lanes at the first try, whoever of them dials: a refusal would cost the first transfer a retry, and
// people a line that means nothing.
func TestFirstLaneIsNotRefused(t *testing.T) {
	for range 8 {
		var logs []*testutil.Log
		begun := func() *running {
			l := &testutil.Log{}
			logs = append(logs, l)
			cfg := testConfig(t, func(c *config.Config) { c.Transports.Order = []string{"tcp", "shm"} })
			return startConfig(t, cfg, func(n *Node) { n.log = slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug})) })
		}
		p, d := begun(), begun()
		pe, de := newEngine(t, p, testShape), newEngine(t, d, testShape)
		x := begin(t, p, pe, de, 1, tokens)
		de.ok(x.dst)
		pe.ok(x.src)
		for i, l := range logs {
			for line := range strings.Lines(l.String()) {
				if strings.Contains(line, wire.OpenUnknown.String()) {
					t.Errorf("node %d: %s", i, line)
				}
			}
		}
	}
}

// An address that did not answer is warned of again once it has answered since.
func TestWarnedOfOnce(t *testing.T) {
	l := &testutil.Log{}
	cfg := testConfig(t, func(c *config.Config) { c.Transports.Order = []string{"tcp"} })
	n := startConfig(t, cfg, func(n *Node) { n.log = slog.New(slog.NewTextHandler(l, nil)) })
	other := start(t, func(c *config.Config) { c.Transports.Order = []string{"tcp"} })
	warned := func() int { return strings.Count(l.String(), "peer not reached") }
	for range 3 {
		n.connectFailed(other.Endpoint(), errTest)
	}
	if warned() != 1 {
		t.Errorf("warned %d times, want once", warned())
	}
	n.connect(other.Endpoint())
	until(t, func() bool { return n.dial.knows(other.Boot()) })
	n.connectFailed(other.Endpoint(), errTest)
	if warned() != 2 {
		t.Errorf("warned %d times, want twice", warned())
	}
}

var errTest = errors.New("no answer")

// What is as good as nobody ends a wait soon. Who says nothing may have been stopped, and go on.
func TestJudged(t *testing.T) {
	for text, nobody := range map[string]bool{
		"connection error: desc = \"transport: authentication handshake failed: tls: failed to verify certificate: x509: certificate signed by unknown authority\"": true,
		"connection error: desc = \"transport: authentication handshake failed: tls: first record does not look like a TLS handshake\"":                             true,
		"connection error: desc = \"error reading server preface: remote error: tls: certificate required\"":                                                        true,
		"connection error: desc = \"error reading server preface: EOF\"":                                                                                            true,
		"connection error: desc = \"error reading server preface: http2: failed reading the frame payload: an HTTP/1.1 header\"":                                    true,
		"connection error: desc = \"transport: authentication handshake failed: context deadline exceeded\"":                                                        false,
		"connection error: desc = \"error reading server preface: read tcp 127.0.0.1:1->127.0.0.1:2: i/o timeout\"":                                                 false,
		"context deadline exceeded": false,
	} {
		if got := errors.Is(judged(errors.New(text)), exec.ErrNobody); got != nobody {
			t.Errorf("%s: nobody is there: %v, want %v", text, got, nobody)
		}
	}
}
