//go:build !amd64

package mem

import "hash/crc32"

func sum(crc uint32, p []byte) uint32 { return crc32.Update(crc, castagnoli, p) }

func copySum(crc uint32, dst, src []byte) uint32 { return copySumThrough(crc, dst, src) }
