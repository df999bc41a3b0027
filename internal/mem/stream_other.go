//go:build !amd64

package mem

func move(dst, src []byte) { copy(dst, src) }

func prefetch([]byte) {}
