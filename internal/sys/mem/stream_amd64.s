#include "textflag.h"

// func streamAVX2(dst, src *byte, n uintptr)
//
// Copies n bytes, a multiple of 256, to dst, which is aligned to 32, with stores that go around the caches. The fence orders
// them before whatever the caller publishes next.
TEXT ·streamAVX2(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
loop:
	VMOVDQU 0(SI), Y0
	VMOVDQU 32(SI), Y1
	VMOVDQU 64(SI), Y2
	VMOVDQU 96(SI), Y3
	VMOVDQU 128(SI), Y4
	VMOVDQU 160(SI), Y5
	VMOVDQU 192(SI), Y6
	VMOVDQU 224(SI), Y7
	VMOVNTDQ Y0, 0(DI)
	VMOVNTDQ Y1, 32(DI)
	VMOVNTDQ Y2, 64(DI)
	VMOVNTDQ Y3, 96(DI)
	VMOVNTDQ Y4, 128(DI)
	VMOVNTDQ Y5, 160(DI)
	VMOVNTDQ Y6, 192(DI)
	VMOVNTDQ Y7, 224(DI)
	ADDQ $256, SI
	ADDQ $256, DI
	SUBQ $256, CX
	JNZ  loop
	SFENCE
	VZEROUPPER
	RET

// func prefetchLines(p *byte, n uintptr)
//
// Asks for each line of 64 bytes of the n at p. A prefetch never faults.
TEXT ·prefetchLines(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX
	ADDQ SI, CX
	ANDQ $~63, SI
next:
	CMPQ SI, CX
	JAE  done
	PREFETCHT1 (SI)
	ADDQ $64, SI
	JMP  next
done:
	RET

// func repMove(dst, src *byte, n uintptr)
//
// Copies n bytes in the way that the processor's microcode has for it.
TEXT ·repMove(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	CLD
	REP; MOVSB
	RET

// func flushLines(p *byte, n uintptr)
//
// Takes each line of 64 bytes of the n at p out of all caches, and waits until they are out.
TEXT ·flushLines(SB), NOSPLIT, $0-16
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), CX
	ADDQ SI, CX
	ANDQ $~63, SI
out:
	CMPQ SI, CX
	JAE  gone
	CLFLUSH (SI)
	ADDQ $64, SI
	JMP  out
gone:
	MFENCE
	RET
