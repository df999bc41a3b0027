package client

import (
	"sync"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/mem"
)

// Free and Close at the same time release memory once.
func TestFreeAndCloseReleaseOnce(t *testing.T) {
	c := &Client{memory: map[*Memory]struct{}{}}
	var all []*Memory
	for range 100 {
		r, err := mem.NewAnonymous("client", 4096)
		if err != nil {
			t.Fatal(err)
		}
		m := &Memory{c: c, region: r}
		all, c.memory[m] = append(all, m), struct{}{}
	}
	all[0].freed()
	var wg sync.WaitGroup
	for _, m := range all[1:50] {
		wg.Go(m.freed)
	}
	c.release()
	wg.Wait()
	for _, m := range all {
		m.freed() // a second release of a region panics
	}
}
