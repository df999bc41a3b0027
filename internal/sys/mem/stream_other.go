//go:build !amd64

package mem

func usable(r routine) bool { return r == ordinary }

func move(dst, src []byte) { copy(dst, src) }

func moveBy(_ routine, dst, src []byte) { copy(dst, src) }

func prefetch([]byte) {}

func flush([]byte) {}
