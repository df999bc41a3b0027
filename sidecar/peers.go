package sidecar

// newPeers opens the control layer towards other sidecars.
func newPeers(n *Node) (peers, error) { return newLink(n) }
