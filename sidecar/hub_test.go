package sidecar

import (
	"context"
	"fmt"
	"sync"

	peerv1 "github.com/kvspray/kvspray/api/peer/v1"
	"github.com/kvspray/kvspray/transfer"
)

// hub joins nodes of one process by an ordered channel per direction, where a test wants to cut control lanes at will.
type hub struct {
	mu    sync.Mutex
	next  int
	nodes map[string]*hubPeers
	boots map[transfer.Boot]*hubPeers
}

func newHub() *hub { return &hub{nodes: map[string]*hubPeers{}, boots: map[transfer.Boot]*hubPeers{}} }

type hubMsg struct {
	from transfer.Boot
	f    *peerv1.ControlFrame
	up   *peerInfo
}

type hubPeers struct {
	h        *hub
	n        *Node
	endpoint string
	in       chan hubMsg
	stop     context.CancelFunc
	wg       sync.WaitGroup
	known    map[transfer.Boot]bool
}

func (h *hub) make(n *Node) (peers, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.next++
	ctx, stop := context.WithCancel(context.Background())
	p := &hubPeers{h: h, n: n, endpoint: fmt.Sprintf("hub:%d", h.next), in: make(chan hubMsg, 1<<16), stop: stop, known: map[transfer.Boot]bool{}}
	h.nodes[p.endpoint], h.boots[n.boot] = p, p
	p.wg.Go(func() {
		for {
			select {
			case m := <-p.in:
				if m.up != nil {
					n.peerUp(*m.up)
					continue
				}
				n.frame(m.from, m.f)
			case <-ctx.Done():
				return
			}
		}
	})
	return p, nil
}

func (p *hubPeers) info(to *hubPeers) *peerInfo {
	in := &peerInfo{Boot: p.n.boot, Endpoint: p.endpoint, HostBoot: p.n.host, Rails: p.n.railList()}
	for i := range in.Key {
		in.Key[i] = p.n.boot[i%16] ^ to.n.boot[i%16]
	}
	return in
}

func (p *hubPeers) Connect(endpoint string) {
	p.h.mu.Lock()
	q := p.h.nodes[endpoint]
	p.h.mu.Unlock()
	if q == nil {
		p.wg.Go(func() { p.n.connectFailed(endpoint, fmt.Errorf("nobody at %s", endpoint)) })
		return
	}
	q.in <- hubMsg{up: p.info(q)}
	p.in <- hubMsg{up: q.info(p)}
}

func (p *hubPeers) Send(to transfer.Boot, f *peerv1.ControlFrame) error {
	p.h.mu.Lock()
	q := p.h.boots[to]
	p.h.mu.Unlock()
	if q == nil {
		return fmt.Errorf("no peer %s", to)
	}
	q.in <- hubMsg{from: p.n.boot, f: f}
	return nil
}

func (p *hubPeers) Endpoint() string { return p.endpoint }

func (p *hubPeers) Close() error {
	p.h.mu.Lock()
	delete(p.h.nodes, p.endpoint)
	delete(p.h.boots, p.n.boot)
	p.h.mu.Unlock()
	p.stop()
	p.wg.Wait()
	return nil
}
