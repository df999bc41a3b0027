package object_test

import (
	"fmt"
	"testing"

	"github.com/kvspray/kvspray/internal/sys/mem"
	"github.com/kvspray/kvspray/store/object"
	"github.com/kvspray/kvspray/store/object/objecttest"
)

// BenchmarkAdd is what memory's eviction of a page takes longer, under its lock, with this tier
// below it: the copy into a buffer that is touched for the first time, and its checksum.
func BenchmarkAdd(b *testing.B) {
	mem.ChooseCopies()
	for _, bytes := range []int{64 << 10, 256 << 10, 4 << 20} {
		b.Run(fmt.Sprintf("%dKiB", bytes>>10), func(b *testing.B) {
			c := config(objecttest.New().Open())
			c.ObjectBytes, c.Size = 0, 4<<30
			tier, err := object.Open(c)
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = tier.Close() }() // nothing is left to upload
			o, err := tier.Owner(ns("a"), bytes, 0, 0)
			if err != nil {
				b.Fatal(err)
			}
			data := make([]byte, bytes)
			crc := mem.CRC32C(0, data)
			b.SetBytes(int64(bytes))
			i := 0
			for b.Loop() {
				k := key(i)
				if err := o.Add(&k, nil, data, crc, nil); err != nil {
					b.Fatal(err)
				}
				if i++; i%(32<<20/bytes) == 0 {
					b.StopTimer()
					if err := tier.Flush(b.Context()); err != nil {
						b.Fatal(err)
					}
					if i*bytes > 1<<30 {
						if err := tier.Remove(b.Context(), ns("a")); err != nil {
							b.Fatal(err)
						}
						i = 0
					}
					b.StartTimer()
				}
			}
		})
	}
}
