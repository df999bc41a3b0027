package topo

import (
	"encoding/binary"
	"errors"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Netlink of data center bridging (linux/dcbnl.h).
const (
	dcbIEEEGet     = 21
	dcbAttrIfName  = 1
	dcbAttrIEEE    = 13
	dcbAttrIEEEPFC = 2
	dcbHeader      = 4
)

type dcbMessage struct{ family, cmd byte }

func (m dcbMessage) Len() int          { return dcbHeader }
func (m dcbMessage) Serialize() []byte { return []byte{m.family, m.cmd, 0, 0} }

// PFC asks the driver which priorities of an interface have flow control, as bits.
func PFC(dev string) (enabled byte, err error) {
	q := nl.NewNetlinkRequest(unix.RTM_GETDCB, 0)
	q.AddData(dcbMessage{unix.AF_UNSPEC, dcbIEEEGet})
	q.AddData(nl.NewRtAttr(dcbAttrIfName, nl.ZeroTerminated(dev)))
	answers, err := q.Execute(unix.NETLINK_ROUTE, 0)
	if err != nil {
		return 0, err //nolint:wrapcheck // the caller needs only that there is none
	}
	for _, a := range answers {
		if on, ok := pfcOf(a); ok {
			return on, nil
		}
	}
	return 0, errors.New("no PFC in the answer")
}

// pfcOf reads pfc_en of struct ieee_pfc in an answer.
func pfcOf(answer []byte) (enabled byte, ok bool) {
	if len(answer) < dcbHeader {
		return 0, false
	}
	pfc := attribute(attribute(answer[dcbHeader:], dcbAttrIEEE), dcbAttrIEEEPFC)
	if len(pfc) < 2 {
		return 0, false
	}
	return pfc[1], true
}

// attribute is the value of the first attribute of a kind in a list of netlink, or nil.
func attribute(b []byte, kind uint16) []byte {
	for len(b) >= unix.SizeofRtAttr {
		n := int(binary.NativeEndian.Uint16(b))
		if n < unix.SizeofRtAttr || n > len(b) {
			return nil
		}
		if binary.NativeEndian.Uint16(b[2:])&^unix.NLA_F_NESTED == kind {
			return b[unix.SizeofRtAttr:n]
		}
		b = b[min((n+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1), len(b)):]
	}
	return nil
}
