package health

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Port is one interface that carries the bytes of a rail.
type Port struct {
	NIC  string
	RDMA string // its InfiniBand device; empty: none
}

// Counters reads the counters of ports from sysfs below root, and adds them; up is whether the link
// has a carrier. A counter that the kernel does not have is 0.
func Counters(root string, up bool, ports []Port) Sample {
	s := Sample{Up: up}
	for _, p := range ports {
		net := filepath.Join(root, "/sys/class/net", p.NIC)
		s.Losses += number(net, "carrier_down_count")
		s.Packets += number(net, "statistics/rx_packets") + number(net, "statistics/tx_packets")
		// rx_errors excludes frames for which the host had no room (rx_missed_errors).
		s.Errors += number(net, "statistics/rx_errors") + number(net, "statistics/tx_errors")
		if p.RDMA == "" {
			continue
		}
		// The interface's packets do not include those of RDMA.
		ib := filepath.Join(root, "/sys/class/infiniband", p.RDMA, "ports/1")
		sent := number(ib, "counters/port_xmit_packets")
		s.Sent += sent
		s.Packets += sent + number(ib, "counters/port_rcv_packets")
		s.Errors += number(ib, "counters/symbol_error") +
			number(ib, "counters/local_link_integrity_errors")
		s.Resent += number(ib, "hw_counters/packet_seq_err") +
			number(ib, "hw_counters/local_ack_timeout_err")
	}
	return s
}

// maxNumber bounds a counter's text, in bytes.
const maxNumber = 32

func number(dir, name string) uint64 {
	f, err := os.Open(filepath.Join(dir, name))
	if err != nil {
		return 0
	}
	defer func() { _ = f.Close() }() // read only
	var b [maxNumber]byte
	n, err := f.Read(b[:])
	if err != nil {
		return 0
	}
	v, err := strconv.ParseUint(strings.TrimSpace(string(b[:n])), 10, 64)
	if err != nil {
		return 0
	}
	return v
}
