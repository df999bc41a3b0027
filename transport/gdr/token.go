package gdr

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvspray/kvspray/transfer"
)

// The token of a grant: number of chunks, then for each chunk its number of blocks and each block's remote address, length and key.
const (
	blockBytes     = 8 + 4 + 4
	maxTokenBytes  = 16 << 20
	maxChunkBlocks = 1024
)

var errToken = errors.New("malformed token")

type remoteBlock struct {
	addr uint64
	len  uint32
	key  uint32
}

type token struct{ chunks [][]remoteBlock }

func (t *token) encode() []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(len(t.chunks)))
	for _, c := range t.chunks {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(c)))
		for _, r := range c {
			b = binary.LittleEndian.AppendUint64(b, r.addr)
			b = binary.LittleEndian.AppendUint32(b, r.len)
			b = binary.LittleEndian.AppendUint32(b, r.key)
		}
	}
	return b
}

// decodeToken reads what a peer sent: bounded, and refused whole where anything is off.
func decodeToken(b []byte) (*token, error) {
	if len(b) < 4 || len(b) > maxTokenBytes {
		return nil, fmt.Errorf("%w: %d bytes", errToken, len(b))
	}
	n := binary.LittleEndian.Uint32(b)
	b = b[4:]
	if n > transfer.MaxSlotChunks || int(n)*4 > len(b) {
		return nil, fmt.Errorf("%w: %d chunks in %d bytes", errToken, n, len(b))
	}
	t := &token{chunks: make([][]remoteBlock, n)}
	for i := range t.chunks {
		if len(b) < 4 {
			return nil, fmt.Errorf("%w: cut at chunk %d", errToken, i)
		}
		k := binary.LittleEndian.Uint32(b)
		b = b[4:]
		if k > maxChunkBlocks || int(k)*blockBytes > len(b) {
			return nil, fmt.Errorf("%w: chunk %d of %d blocks in %d bytes", errToken, i, k, len(b))
		}
		for range k {
			t.chunks[i] = append(t.chunks[i], remoteBlock{binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint32(b[8:]), binary.LittleEndian.Uint32(b[12:])})
			b = b[blockBytes:]
		}
	}
	if len(b) != 0 {
		return nil, fmt.Errorf("%w: %d bytes too many", errToken, len(b))
	}
	return t, nil
}
