// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"net/http"
	"os"
	"testing"

	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/testutil"
)

// fewDescriptors runs a node with a usual limit, which the connections below exceed many times.
const fewDescriptors = "ulimit -n 1024 && " + childConfig + "=\"$1\" exec \"$0\""

// Strangers who hold thousands of connections cost members nothing, even where the process has few
// descriptors: the port answers others, an engine registers, and a new peer gets its blocks.
func TestStrangersTakeNoDescriptors(t *testing.T) {
	const many, perSecond = 10_000, 200
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := newProcess(t, "tcp", "sh", "-c", fewDescriptors, exe)
	for _, at := range []string{p.http, p.endpoint} {
		testutil.Strangers(t, at, many, perSecond, testutil.ManyStrangers, nil)
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	for _, path := range []string{"/readyz", "/metrics", "/debug/state"} {
		res, err := client.Get("http://" + p.http + path)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		if res.StatusCode != http.StatusOK {
			t.Errorf("%s: %s", path, res.Status)
		}
	}
	d := start(t, func(c *config.Config) { c.Transports.Order = []string{"tcp"} })
	pe, de := newEngine(t, p.asRunning(), testShape), newEngine(t, d, testShape)
	pe.random()
	x := begin(t, p.asRunning(), pe, de, 1, tokens)
	de.ok(x.dst)
	same(t, pe, de, x.pt, x.dt, tokens, 0)
	pe.ok(x.src)
}
