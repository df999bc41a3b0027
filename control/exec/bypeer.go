// SPDX-License-Identifier: Apache-2.0

package exec

import "github.com/kvspray/kvspray/transfer"

// byPeer lists what a part has to do with each boot of another sidecar, so that the loss of a peer
// costs what concerns that peer. Entries do not end with the peer: leases outlive a peer that was
// forgotten.
type byPeer[T comparable] map[transfer.Boot]map[T]struct{}

func (b byPeer[T]) add(boot transfer.Boot, x T) {
	if b[boot] == nil {
		b[boot] = map[T]struct{}{}
	}
	b[boot][x] = struct{}{}
}

func (b byPeer[T]) remove(boot transfer.Boot, x T) {
	if all := b[boot]; all != nil {
		if delete(all, x); len(all) == 0 {
			delete(b, boot)
		}
	}
}
