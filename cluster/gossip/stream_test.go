package gossip

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvspray/kvspray/cluster"
	"github.com/kvspray/kvspray/internal/admit"
	"github.com/kvspray/kvspray/internal/testutil"
	"github.com/kvspray/kvspray/transfer"
)

// Strangers hold streams of the gossip port by the thousand and open more: few are held, and a
// member joins beside them.
func TestStrangersAtGossip(t *testing.T) {
	key := make([]byte, 32)
	_, _ = rand.Read(key)
	victim := begun(t, key)
	stop := testutil.Strangers(t, victim.Address(), 2000, 500, testutil.ManyStrangers, nil)
	began := time.Now()
	fresh := begun(t, key, victim.Address())
	poll(t, "both are members", func() bool {
		return len(fresh.Members()) == 2 &&
			len(victim.Members()) == 2
	})
	took := time.Since(began)
	g := victim.net.gate
	poll(t, "strangers make room for strangers", func() bool { return g.Evicted() > 1000 })
	if n := g.Held(); n > gossipStreams {
		t.Errorf("%d streams of strangers are held, at most %d", n, gossipStreams)
	}
	t.Logf("%d streams of strangers; a member joined within %v", stop(), took)
}

// The bound of bytes before decryption is far below memberlist's own.
func TestLongStreamAtGossip(t *testing.T) {
	key := make([]byte, 32)
	_, _ = rand.Read(key)
	victim := begun(t, key)
	c, err := net.Dial("tcp", victim.Address())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const claimed = 20 << 20 // memberlist's own bound
	head := binary.BigEndian.AppendUint32([]byte{10}, claimed)
	if _, err := c.Write(head); err != nil {
		t.Fatal(err)
	}
	go func() {
		for b := make([]byte, 64<<10); ; {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	}()
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(c) // memberlist sends the reason in an error of its own
	if errors.Is(err, syscall.ECONNRESET) {
		err = nil
	}
	if err != nil {
		t.Fatalf("the stream is still open: %v", err)
	}
	t.Logf("%d bytes of answer", len(answer))
	a, b := net.Pipe()
	defer a.Close()
	s := &stream{Conn: b, left: 3}
	go func() { _, _ = a.Write([]byte("four")) }()
	got, err := io.ReadAll(s)
	_ = b.Close()
	if !errors.Is(err, errStream) || !strings.HasPrefix("four", string(got)) || len(got) != 3 {
		t.Errorf("%q, %v", got, err)
	}
}

// A member leaves at once, also while it connects to members that do not answer.
func TestLeaveBesideDeadMembers(t *testing.T) {
	g, err := Start(Options{Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler),
		stream: time.Hour}, cluster.Member{Node: "n", Boot: transfer.Boot{1}}, admit.NewMembers())
	if err != nil {
		t.Fatal(err)
	}
	dead := testutil.FullListener(t).Addr().String()
	post := g.self.serving.post
	g.self.mu.Lock()
	for i := range postAtOnce + 1 {
		g.self.serving.routers[fmt.Sprint(i)] = dead
	}
	g.self.mu.Unlock()
	for i := range postAtOnce + 1 {
		post.add(fmt.Sprint(i))
	}
	poll(t, "messages are being sent", func() bool { return dialsTo(t, dead) > 0 })
	left := make(chan error, 1)
	go func() { left <- g.Leave() }()
	select {
	case err := <-left:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Fatal("it waits for members that do not answer")
	}
}

// dialsTo counts connections of this host to an address that are not accepted yet.
func dialsTo(t *testing.T, addr string) (n int) {
	t.Helper()
	table, err := os.ReadFile("/proc/self/net/tcp")
	if err != nil {
		t.Fatal(err)
	}
	at := netip.MustParseAddrPort(addr)
	ip := at.Addr().As4()
	const synSent = "02"
	want := fmt.Sprintf(" %08X:%04X %s ", binary.NativeEndian.Uint32(ip[:]), at.Port(), synSent)
	return strings.Count(string(table), want)
}
