package exec

import "github.com/kvspray/kvspray/transfer"

// Quickest names our rail of a transport over which a short message gets to boot soonest: control frames stand in the same queues in front of a
// rail as slices do, and an urgent transfer waits for some of them. False: no rail there is in use.
func (e *Exec) Quickest(now Instant, boot transfer.Boot, transport string) (rail string, ok bool) {
	p := e.peers[boot]
	if p == nil {
		return "", false
	}
	path, ok := e.spray.Quickest(now, p.rails, transport)
	return path.Local, ok
}
