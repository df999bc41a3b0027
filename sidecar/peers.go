package sidecar

import "errors"

// newPeers opens the control layer towards other sidecars.
func newPeers(n *Node) (peers, error) {
	if n.makePeers == nil {
		return nil, errors.New("sidecar: this build has no control layer")
	}
	return n.makePeers(n)
}
