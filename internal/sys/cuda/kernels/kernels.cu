// The kernels of the sidecar: they rearrange bytes, packing, unpacking and moving inside one GPU's memory while copy engines cross links. Scattered
// pages of the host they read and write themselves where no other kernel computes on the GPU, and nowhere else (see gpu/doc.go).
//
// Compiled by generate.py to PTX (any later GPU, by the driver's JIT) and to sm_80 and sm_90 code; both are committed.

typedef unsigned long long u64;
typedef unsigned int u32;

// One strided run: rows of count pieces of len bytes, piece i at base + i / count * outer + i % count * stride. The dense side is contiguous:
// piece i of the run lies at dense + i * len. All of base, stride, outer, dense and len are multiples of 16.
struct kvs_run {
	u64 base;
	u64 stride;
	u64 outer;
	u64 dense;
	u32 len;
	u32 count;
};

// Threads of a block move a piece together, VEC x 16 bytes per thread in flight before any is stored: NVLink and HBM want
// about a megabyte in flight, and a load that waits for its store does not give it.
template <int VEC>
static __device__ __forceinline__ void copy_piece(const char *src, char *dst, u32 len)
{
	const u32 lanes = blockDim.x * 16;
	u32 off = threadIdx.x * 16;
	for (; off + (VEC - 1) * lanes < len; off += VEC * lanes) {
		uint4 v[VEC];
#pragma unroll
		for (int i = 0; i < VEC; i++)
			v[i] = __ldcs(reinterpret_cast<const uint4 *>(src + off + i * lanes));
#pragma unroll
		for (int i = 0; i < VEC; i++)
			__stcs(reinterpret_cast<uint4 *>(dst + off + i * lanes), v[i]);
	}
	for (; off < len; off += lanes)
		__stcs(reinterpret_cast<uint4 *>(dst + off), __ldcs(reinterpret_cast<const uint4 *>(src + off)));
}

// The last of n runs whose first piece is <= p.
static __device__ __forceinline__ u32 last_before(const u32 *first, u64 n, u32 p)
{
	u32 lo = 0, hi = (u32)n;
	while (hi - lo > 1) {
		u32 mid = (lo + hi) / 2;
		if (first[mid] <= p)
			lo = mid;
		else
			hi = mid;
	}
	return lo;
}

// rearrange walks the pieces of all runs; block b takes a contiguous share of them, so that it searches once and then walks.
// `runs` are in order, `first` holds the number of pieces before each run, first[n] the total.
template <int VEC, bool PACK>
static __device__ __forceinline__ void rearrange(const kvs_run *runs, const u32 *first, u64 n)
{
	const u64 total = first[n];
	u32 p = (u32)(total * blockIdx.x / gridDim.x);
	const u32 end = (u32)(total * (blockIdx.x + 1) / gridDim.x);
	if (p >= end)
		return;
	u32 lo = last_before(first, n, p);
	for (; p < end; p++) {
		while (p >= first[lo + 1])
			lo++;
		const kvs_run r = runs[lo];
		const u32 i = p - first[lo], row = i / r.count;
		char *scattered = reinterpret_cast<char *>(r.base + row * r.outer + (i - row * r.count) * r.stride);
		char *dense = reinterpret_cast<char *>(r.dense + (u64)i * r.len);
		if (PACK)
			copy_piece<VEC>(scattered, dense, r.len);
		else
			copy_piece<VEC>(dense, scattered, r.len);
	}
}

// The common case: every piece has the same length and its own address, piece i lies at dense + i * len.
template <int VEC, bool PACK>
static __device__ __forceinline__ void rearrange_uniform(const u64 *base, u64 n, u64 dense, u64 len)
{
	const u64 end = n * (blockIdx.x + 1) / gridDim.x;
	for (u64 i = n * blockIdx.x / gridDim.x; i < end; i++) {
		char *scattered = reinterpret_cast<char *>(base[i]);
		char *packed = reinterpret_cast<char *>(dense + i * len);
		if (PACK)
			copy_piece<VEC>(scattered, packed, (u32)len);
		else
			copy_piece<VEC>(packed, scattered, (u32)len);
	}
}

// One strided run within the GPU: count pieces of len bytes, piece i from src + i * src_stride to dst + i * dst_stride. All are multiples of 16.
struct kvs_move {
	u64 src;
	u64 dst;
	u64 src_stride;
	u64 dst_stride;
	u32 len;
	u32 count;
};

// move copies the pieces of all moves; each block takes a contiguous share of them. `first` is as for rearrange.
template <int VEC>
static __device__ __forceinline__ void move(const kvs_move *moves, const u32 *first, u64 n)
{
	const u64 total = first[n];
	u32 p = (u32)(total * blockIdx.x / gridDim.x);
	const u32 end = (u32)(total * (blockIdx.x + 1) / gridDim.x);
	if (p >= end)
		return;
	u32 at = last_before(first, n, p);
	for (; p < end; p++) {
		while (p >= first[at + 1])
			at++;
		const kvs_move m = moves[at];
		const u64 i = p - first[at];
		copy_piece<VEC>(reinterpret_cast<const char *>(m.src + i * m.src_stride), reinterpret_cast<char *>(m.dst + i * m.dst_stride), m.len);
	}
}

#define REARRANGE(vec)                                                                                      \
	extern "C" __global__ void kvs_pack_v##vec(const kvs_run *runs, const u32 *first, u64 n)                \
	{                                                                                                       \
		rearrange<vec, true>(runs, first, n);                                                               \
	}                                                                                                       \
	extern "C" __global__ void kvs_unpack_v##vec(const kvs_run *runs, const u32 *first, u64 n)              \
	{                                                                                                       \
		rearrange<vec, false>(runs, first, n);                                                              \
	}                                                                                                       \
	extern "C" __global__ void kvs_pack_uniform_v##vec(const u64 *base, u64 n, u64 dense, u64 len)          \
	{                                                                                                       \
		rearrange_uniform<vec, true>(base, n, dense, len);                                                  \
	}                                                                                                       \
	extern "C" __global__ void kvs_unpack_uniform_v##vec(const u64 *base, u64 n, u64 dense, u64 len)        \
	{                                                                                                       \
		rearrange_uniform<vec, false>(base, n, dense, len);                                                 \
	}                                                                                                       \
	extern "C" __global__ void kvs_move_v##vec(const kvs_move *moves, const u32 *first, u64 n)              \
	{                                                                                                       \
		move<vec>(moves, first, n);                                                                         \
	}

REARRANGE(4)
