package topo

import (
	"testing"

	"github.com/vishvananda/netlink/nl"
)

// The answer of a driver about flow control: priorities 3 and 4.
func TestPFC(t *testing.T) {
	inner := nl.NewRtAttr(dcbAttrIEEEPFC, append([]byte{8, 1<<3 | 1<<4}, make([]byte, 134)...))
	answer := append([]byte{0, dcbIEEEGet, 0, 0}, nl.NewRtAttr(dcbAttrIfName,
		nl.ZeroTerminated("ens1")).Serialize()...)
	answer = append(answer, nl.NewRtAttr(dcbAttrIEEE, inner.Serialize()).Serialize()...)
	on, ok := pfcOf(answer)
	if !ok || on != 1<<3|1<<4 {
		t.Errorf("%#x, %v", on, ok)
	}
	for n := range answer {
		pfcOf(answer[:n]) // does not panic
	}
}
