#include "textflag.h"

// FOLD folds the 64 bytes of x into next, with the result in x: it multiplies each half of 16 bytes
// of x by the power in k, and adds next.
#define FOLD(x, k, next, t) \
	VPCLMULQDQ $0x00, k, x, t \
	VPCLMULQDQ $0x11, k, x, x \
	VPTERNLOGQ $0x96, next, t, x

// LOAD loads 256 bytes.
#define LOAD(a, b, c, d) \
	VMOVDQU64 0(SI), a \
	VMOVDQU64 64(SI), b \
	VMOVDQU64 128(SI), c \
	VMOVDQU64 192(SI), d

// STORE stores 256 bytes without filling the caches.
#define STORE(a, b, c, d) \
	VMOVNTDQ a, 0(DI) \
	VMOVNTDQ b, 64(DI) \
	VMOVNTDQ c, 128(DI) \
	VMOVNTDQ d, 192(DI)

// BEGIN loads the constants, and adds the CRC register in AX to the first 4 bytes of the message.
#define BEGIN \
	VBROADCASTI32X4 0(R8), Z30 \
	VBROADCASTI32X4 16(R8), Z31 \
	VMOVD AX, X4 \
	VPXORQ Z4, Z0, Z0

// NEXT folds the 256 bytes of Z16 to Z19 into Z0 to Z3.
#define NEXT \
	FOLD(Z0, Z30, Z16, Z20) \
	FOLD(Z1, Z30, Z17, Z21) \
	FOLD(Z2, Z30, Z18, Z22) \
	FOLD(Z3, Z30, Z19, Z23)

// END folds Z0 to Z3 to 64 bytes. AX becomes the CRC register of these 64 bytes alone.
#define END \
	FOLD(Z0, Z31, Z1, Z20) \
	FOLD(Z0, Z31, Z2, Z20) \
	FOLD(Z0, Z31, Z3, Z20) \
	VMOVDQU64 Z0, rest-64(SP) \
	VZEROUPPER \
	XORL AX, AX \
	CRC32Q rest-64(SP), AX \
	CRC32Q rest-56(SP), AX \
	CRC32Q rest-48(SP), AX \
	CRC32Q rest-40(SP), AX \
	CRC32Q rest-32(SP), AX \
	CRC32Q rest-24(SP), AX \
	CRC32Q rest-16(SP), AX \
	CRC32Q rest-8(SP), AX

// func foldSum(crc uint32, k *[4]uint64, p *byte, n uintptr) uint32
//
// foldSum continues the CRC register crc over n bytes. n is a positive multiple of 256.
TEXT ·foldSum(SB), NOSPLIT, $64-36
	MOVL crc+0(FP), AX
	MOVQ k+8(FP), R8
	MOVQ p+16(FP), SI
	MOVQ n+24(FP), CX
	LOAD(Z0, Z1, Z2, Z3)
	BEGIN
more:
	ADDQ $256, SI
	SUBQ $256, CX
	JZ   whole
	LOAD(Z16, Z17, Z18, Z19)
	NEXT
	JMP  more
whole:
	END
	MOVL AX, ret+32(FP)
	RET

// func foldCopy(crc uint32, k *[4]uint64, dst, src *byte, n uintptr) uint32
//
// foldCopy copies n bytes to dst, and continues the CRC register crc over them. n is a positive
// multiple of 256, and dst is aligned to 64. The loop reads each byte once. The fence orders the
// non-temporal stores before later stores of the caller.
TEXT ·foldCopy(SB), NOSPLIT, $64-44
	MOVL crc+0(FP), AX
	MOVQ k+8(FP), R8
	MOVQ dst+16(FP), DI
	MOVQ src+24(FP), SI
	MOVQ n+32(FP), CX
	LOAD(Z0, Z1, Z2, Z3)
	STORE(Z0, Z1, Z2, Z3)
	BEGIN
more:
	ADDQ $256, SI
	ADDQ $256, DI
	SUBQ $256, CX
	JZ   whole
	LOAD(Z16, Z17, Z18, Z19)
	STORE(Z16, Z17, Z18, Z19)
	NEXT
	JMP  more
whole:
	SFENCE
	END
	MOVL AX, ret+40(FP)
	RET

// NARROW is FOLD for 16 bytes.
#define NARROW(x, k, next, t) \
	VPCLMULQDQ $0x00, k, x, t \
	VPCLMULQDQ $0x11, k, x, x \
	VPXOR t, x, x \
	VPXOR next, x, x

// FIRST loads the first 16 bytes into x and stores them. LANE does so with the next 16 bytes, and
// folds x into them.
#define FIRST(at, x) \
	VMOVDQU at(SI), x \
	VMOVNTDQ x, at(DI)
#define LANE(at, x) \
	VMOVDQU at(SI), X9 \
	VMOVNTDQ X9, at(DI) \
	NARROW(x, X14, X9, X8)

// func narrowCopy(crc uint32, k *[4]uint64, dst, src *byte, n uintptr) uint32
//
// narrowCopy is foldCopy for processors without AVX-512. n is a positive multiple of 128. A
// prefetch beyond the source does not fault.
TEXT ·narrowCopy(SB), NOSPLIT, $0-44
	MOVL crc+0(FP), AX
	MOVQ k+8(FP), R8
	MOVQ dst+16(FP), DI
	MOVQ src+24(FP), SI
	MOVQ n+32(FP), CX
	VMOVDQU 0(R8), X14
	VMOVDQU 16(R8), X15
	FIRST(0, X0)
	FIRST(16, X1)
	FIRST(32, X2)
	FIRST(48, X3)
	FIRST(64, X4)
	FIRST(80, X5)
	FIRST(96, X6)
	FIRST(112, X7)
	VMOVD AX, X8
	VPXOR X8, X0, X0
more:
	ADDQ $128, SI
	ADDQ $128, DI
	SUBQ $128, CX
	JZ   whole
	PREFETCHT0 2048(SI)
	PREFETCHT0 2112(SI)
	LANE(0, X0)
	LANE(16, X1)
	LANE(32, X2)
	LANE(48, X3)
	LANE(64, X4)
	LANE(80, X5)
	LANE(96, X6)
	LANE(112, X7)
	JMP  more
whole:
	SFENCE
	NARROW(X0, X15, X1, X8)
	NARROW(X0, X15, X2, X8)
	NARROW(X0, X15, X3, X8)
	NARROW(X0, X15, X4, X8)
	NARROW(X0, X15, X5, X8)
	NARROW(X0, X15, X6, X8)
	NARROW(X0, X15, X7, X8)
	VMOVQ X0, R9
	VPEXTRQ $1, X0, R10
	VZEROUPPER
	XORL AX, AX
	CRC32Q R9, AX
	CRC32Q R10, AX
	MOVL AX, ret+40(FP)
	RET

// func wordsCopy(crc uint32, dst, src *byte, n uintptr) uint32
//
// wordsCopy is foldCopy for any number of bytes at any alignment, with ordinary stores.
TEXT ·wordsCopy(SB), NOSPLIT, $0-36
	MOVL crc+0(FP), AX
	MOVQ dst+8(FP), DI
	MOVQ src+16(FP), SI
	MOVQ n+24(FP), CX
eight:
	CMPQ CX, $8
	JB   one
	MOVQ (SI), R9
	MOVQ R9, (DI)
	CRC32Q R9, AX
	ADDQ $8, SI
	ADDQ $8, DI
	SUBQ $8, CX
	JMP  eight
one:
	TESTQ CX, CX
	JZ   none
	MOVBLZX (SI), R9
	MOVB R9, (DI)
	CRC32B R9, AX
	INCQ SI
	INCQ DI
	DECQ CX
	JMP  one
none:
	MOVL AX, ret+32(FP)
	RET
