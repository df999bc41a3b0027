package ping

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/internal/config"
	"github.com/kvspray/kvspray/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// peer answers Probe; a node with no name refuses.
type peer struct {
	peerv1.UnimplementedPeerServer
	node string
}

func (p *peer) Probe(context.Context, *peerv1.ProbeRequest) (*peerv1.ProbeReply, error) {
	if p.node == "" {
		return nil, status.Error(codes.PermissionDenied, "another cluster")
	}
	return &peerv1.ProbeReply{Boot: []byte{0xbb}, Node: p.node, Version: "v1"}, nil
}

func serve(t *testing.T, node string) string {
	t.Helper()
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	peerv1.RegisterPeerServer(s, &peer{node: node})
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-ended })
	return l.Addr().String()
}

// local is a configuration with a local sidecar that has met the peer.
func local(t *testing.T, endpoint string) *config.Config {
	t.Helper()
	body := `{"peers":[{"boot":"bb","node":"d0","endpoint":"` + endpoint + `","links":[
		{"transport":"tcp","local":"eth0","remote":"eth1","state":"healthy","lanes":2,
		 "bytes_per_second":1.25e9,"samples":3,"min_delay_seconds":0.0002},
		{"transport":"tcp","local":"eth1","remote":"eth1","state":"excluded"}]}]}`
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(body))
	}))
	t.Cleanup(s.Close)
	c := config.Default()
	c.HTTP.Listen = strings.TrimPrefix(s.URL, "http://")
	return c
}

func TestPing(t *testing.T) {
	endpoint := serve(t, "d\x1b0")
	c := local(t, endpoint)
	for _, who := range []string{endpoint, "d0"} {
		r, err := Run(t.Context(), Options{Peer: who, Count: 3, Config: c})
		if err != nil {
			t.Fatal(err)
		}
		if r.Endpoint != endpoint || r.Boot != "bb" || len(r.RTT) != 3 || r.Connect <= 0 ||
			len(r.Rails) != 2 || r.MTU < 1280 || r.Local != "" {
			t.Errorf("%s: %+v", who, r)
		}
		var text, asJSON bytes.Buffer
		if err := r.WriteText(&text); err != nil {
			t.Fatal(err)
		}
		for _, part := range []string{endpoint + " is d?0 (kvspray v1, boot bb), without a key",
			" of 3\n",
			"tcp:eth0 to eth1  healthy   2 lanes  delay 200µs  10.00 Gb/s learned",
			"tcp:eth1 to eth1  excluded  0 lanes", "not learned yet"} {
			if !strings.Contains(text.String(), part) {
				t.Errorf("no %q in:\n%s", part, &text)
			}
		}
		var back Report
		if err := r.WriteJSON(&asJSON); err != nil || json.Unmarshal(asJSON.Bytes(), &back) != nil ||
			back.Node != r.Node {
			t.Errorf("%v, %s", err, &asJSON)
		}
	}
}

func TestNoAnswer(t *testing.T) {
	c := local(t, "127.0.0.1:1")
	var lc net.ListenConfig
	other, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	hangsUp := make(chan struct{})
	go func() {
		defer close(hangsUp)
		for {
			c, err := other.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	defer func() { _ = other.Close(); <-hangsUp }()
	for who, want := range map[string]string{
		"127.0.0.1:1": "nothing listens there",
		"nobody":      "the local sidecar has no peer of that name",
		serve(t, ""):  "another cluster",

		other.Addr().String(): "with the key of peer.cluster_key_file",
		"10.0.0.1:7650":       "set peer.cluster_key_file",
	} {
		_, err := Run(t.Context(), Options{Peer: who, Count: 1, Config: c})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", who, err, want)
		}
	}
	c.HTTP.Listen = config.Off
	r, err := Run(t.Context(), Options{Peer: serve(t, "d0"), Count: 1, Config: c})
	if err != nil || !strings.Contains(r.Local, "http.listen is off") {
		t.Errorf("%+v, %v", r, err)
	}
}
