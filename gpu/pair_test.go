package gpu

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvspray/kvspray/gpu/gputest"
	"github.com/kvspray/kvspray/gpu/policy"
	"github.com/kvspray/kvspray/internal/sys/mem"
)

// TestTriedWithLittle: a trial gets a small part of a batch, and the other method the rest.
func TestTriedWithLittle(t *testing.T) {
	plat := gputest.NewPlatform(2)
	g := gputest.Must(newGPUs(plat, Config{Slots: 3, Buffers: 8, PeerStage: 1 << 20}))(t)
	const block, n = 16 << 10, 4 * policy.TrialBytes / (16 << 10)
	h0, src := plat.Lend(0, n*block, 0)
	h1, dst := plat.Lend(1, n*block, 0)
	from := gputest.Must(g.Import(mem.NewID(), h0.Append(nil), -1, n*block))(t)
	to := gputest.Must(g.Import(mem.NewID(), h1.Append(nil), -1, n*block))(t)
	rand.NewChaCha8([32]byte{1}).Read(src)
	var a, b []mem.Block
	for _, i := range rand.New(rand.NewPCG(1, 1)).Perm(n) {
		a = append(a, mem.Block{Region: from, Off: uint64(i) * block, Len: block})
		b = append(b, mem.Block{Region: to, Off: uint64(i) * block, Len: block})
	}
	u0, u1 := from.Device().(*GPU), to.Device().(*GPU)
	p := gputest.Must(g.pair(u0, u1))(t)
	p.probed = false // as where no probe works
	p.policy.Observe(policy.Pack, 1<<20, time.Unix(1, 0), time.Unix(1, 1e6))
	crossed := func() (n uint64) { // what went over the link between the two
		for _, d := range plat.Devices[0][1:] { // those of the pipelines
			d.Mu.Lock()
			n += d.Bytes
			d.Mu.Unlock()
		}
		return n
	}
	// Copy is unknown, so it is tried; then the first is in favor.
	for _, all := range []bool{false, true} {
		clear(dst)
		before := crossed()
		if err := u1.Move(b, a); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(src, dst) {
			t.Fatal("content differs")
		}
		got := crossed() - before // lists of blocks too
		if limit := uint64(n*block) * 21 / 20; all && got < n*block || !all &&
			(got > limit-policy.TrialBytes || got < n*block-policy.TrialBytes-block) {
			t.Errorf("%d bytes crossed the link of %d; all: %v", got, n*block, all)
		}
		p.policy = policy.Decided(map[policy.CopyMethod]float64{policy.Pack: 1, policy.Copy: 2})
	}
	from.Release()
	to.Release()
	if err := g.Close(); err != nil {
		t.Error(err)
	}
}
