package tcp

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/kvspray/kvspray/internal/wire"
	"github.com/kvspray/kvspray/transport"
)

// describe fills in what the kernel reports about the interface behind a rail. The rest
// stays zero.
func describe(rc Rail, a *net.TCPAddr) transport.Rail {
	r := transport.Rail{Name: rc.Name, Address: rc.Advertise, Gbps: rc.Gbps, Tier: rc.Tier, NUMA: -1}
	if r.Address == "" {
		r.Address = a.String()
	}
	if ifc := interfaceOf(a.IP); ifc != nil {
		if r.Name == "" {
			r.Name = ifc.Name
		}
		r.MTU = ifc.MTU
		dir := filepath.Join("/sys/class/net", ifc.Name)
		if mbps, ok := sysInt(filepath.Join(dir, "speed")); ok && mbps > 0 && r.Gbps == 0 {
			r.Gbps = float64(mbps) / 1000
		}
		if n, ok := sysInt(filepath.Join(dir, "device", "numa_node")); ok && n >= 0 {
			r.NUMA = n
		}
	}
	if r.Name == "" {
		r.Name = a.String()
	}
	return r
}

func interfaceOf(ip net.IP) *net.Interface {
	ifs, err := net.Interfaces()
	if err != nil || ip.IsUnspecified() {
		return nil
	}
	for i := range ifs {
		addrs, err := ifs[i].Addrs()
		if err != nil {
			continue
		}
		for _, a := range addrs {
			// Contains, because all of 127.0.0.0/8 is lo.
			if n, ok := a.(*net.IPNet); ok && (n.IP.Equal(ip) || ip.IsLoopback() && n.Contains(ip)) {
				return &ifs[i]
			}
		}
	}
	return nil
}

func sysInt(path string) (int, bool) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(b)))
	return n, err == nil
}

// attachment is what each end sends about a lane when it opens: one byte of features, then its own
// and the other end's rail name, each with a length byte.
type attachment struct {
	crc           bool // wants checksums
	aead          bool // wants sealed records
	local, remote string
}

// The features.
const (
	wantsCRC = 1 << iota
	wantsAEAD
)

// agree decides what a lane has: what either end wants.
func agree(ours, theirs attachment) (crc, aead bool) {
	aead = ours.aead || theirs.aead
	return (ours.crc || theirs.crc) && !aead, aead
}

const maxRailName = 128 // bytes

func (a attachment) encode() []byte {
	b := make([]byte, 1, 3+2*maxRailName)
	for bit, on := range map[byte]bool{wantsCRC: a.crc, wantsAEAD: a.aead} {
		if on {
			b[0] |= bit
		}
	}
	for _, s := range []string{a.local, a.remote} {
		s = s[:min(len(s), maxRailName)]
		b = append(append(b, byte(len(s))), s...)
	}
	return b
}

// parseAttachment reads an attachment; a newer peer may append to it.
func parseAttachment(b []byte) (attachment, error) {
	bad := fmt.Errorf("tcp: attachment of %d bytes: %w", len(b), wire.ErrMalformed)
	if len(b) < 1 {
		return attachment{}, bad
	}
	a := attachment{crc: b[0]&wantsCRC != 0, aead: b[0]&wantsAEAD != 0}
	b = b[1:]
	for _, p := range []*string{&a.local, &a.remote} {
		if len(b) < 1 || len(b)-1 < int(b[0]) || b[0] > maxRailName {
			return attachment{}, bad
		}
		*p, b = string(b[1:1+int(b[0])]), b[1+int(b[0]):]
	}
	return a, nil
}
