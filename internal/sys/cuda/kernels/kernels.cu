// SPDX-License-Identifier: Apache-2.0
//
// The kernels of the sidecar: they rearrange bytes, packing and unpacking inside one GPU's memory while copy engines cross links. Scattered
// pages of the host they read and write themselves where nobody else computes on the GPU, and nowhere else (gpu/knock.go).
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
	u32 lo = 0, hi = (u32)n; // the last run whose first piece is <= p
	while (hi - lo > 1) {
		u32 mid = (lo + hi) / 2;
		if (first[mid] <= p)
			lo = mid;
		else
			hi = mid;
	}
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
	}

REARRANGE(4)

// What captured graphs of an engine are given to move, in host memory that the GPU sees: pybind/src/graph.h has the same struct, and says who
// writes what. One slot for each of the work board.
enum { GRAPH_SLOTS = 8 };

struct kvs_graph_slot {
	u64 armed;
	u64 revoked;
	u64 taken;
	u64 skipped;
	u64 list, first, n, dense; // as the kernels above take them: runs and first, or bases and dense
	u32 len;                   // 0: runs
	u32 unpack;
	u64 own, done, seq; // *done becomes seq, and then *own the ticket, once everything is moved
	u64 pad[4];
};
static_assert(sizeof(kvs_graph_slot) == 128, "as in graph.h");

// What one layer's node has taken, in memory of the GPU: the next layer takes while it is moved.
struct kvs_graph_job {
	u64 list, first, n, dense;
	u64 len, unpack;
	u64 own, done, ticket, seq;
};

struct kvs_graph_batch {
	u64 n[GRAPH_SLOTS]; // of jobs; 0: there is none. Looked at first, by every block
	u32 ended;          // blocks; 0 between two launches
	u32 pad[15];
	kvs_graph_job jobs[GRAPH_SLOTS];
};
static_assert(sizeof(kvs_graph_batch) == 128 + GRAPH_SLOTS * 80, "as in graph.h");

// What is the same for all layers.
struct kvs_graph_seen {
	u64 pulse;
	u64 last[GRAPH_SLOTS]; // ticket that was looked at
};

// kvs_graph_take is kvs_flag for a layer whose graph moves things, too: a thread for each slot takes what is armed there. The host may revoke
// at any time, and both sides say so before they look at what the other one said: one of the two is seen, or both. Where both are, it is skipped.
// Tickets grow, so that whoever comes late finds an older ticket than the one that was revoked last.
extern "C" __global__ void kvs_graph_take(const volatile u64 *step, volatile u64 *flag, volatile u64 *pulse, volatile kvs_graph_slot *slots, kvs_graph_seen *seen,
                                          kvs_graph_batch *batch)
{
	const u32 i = threadIdx.x;
	if (i == 0) {
		__threadfence_system();
		*flag = *step;
		*pulse = ++seen->pulse;
	}
	volatile kvs_graph_slot *s = &slots[i];
	const u64 ticket = s->armed;
	bool mine = atomicMax(&seen->last[i], ticket) < ticket;
	if (mine) {
		s->taken = ticket;
		__threadfence_system();
		mine = s->revoked < ticket;
		if (!mine)
			s->skipped = ticket;
	}
	if (mine) {
		kvs_graph_job *j = &batch->jobs[i];
		j->list = s->list;
		j->first = s->first;
		j->n = s->n;
		j->dense = s->dense;
		j->len = s->len;
		j->unpack = s->unpack;
		j->own = s->own;
		j->done = s->done;
		j->ticket = ticket;
		j->seq = s->seq;
	}
	batch->n[i] = mine ? batch->jobs[i].n : 0;
}

// kvs_graph_move does what the layer's kvs_graph_take has taken. The last block to end says so.
extern "C" __global__ void kvs_graph_move(kvs_graph_batch *batch)
{
	bool any = false;
	for (u32 i = 0; i < GRAPH_SLOTS; i++) {
		const u64 n = batch->n[i];
		if (n == 0)
			continue;
		any = true;
		const kvs_graph_job *j = &batch->jobs[i];
		const kvs_run *runs = reinterpret_cast<const kvs_run *>(j->list);
		const u64 *bases = reinterpret_cast<const u64 *>(j->list);
		const u32 *first = reinterpret_cast<const u32 *>(j->first);
		if (j->len && j->unpack)
			rearrange_uniform<4, false>(bases, n, j->dense, j->len);
		else if (j->len)
			rearrange_uniform<4, true>(bases, n, j->dense, j->len);
		else if (j->unpack)
			rearrange<4, false>(runs, first, n);
		else
			rearrange<4, true>(runs, first, n);
	}
	if (!any)
		return;
	__syncthreads();
	if (threadIdx.x != 0)
		return;
	__threadfence_system();
	if (atomicAdd(&batch->ended, 1) + 1 < gridDim.x)
		return;
	batch->ended = 0;
	__threadfence_system();
	for (u32 i = 0; i < GRAPH_SLOTS; i++)
		if (batch->n[i])
			*reinterpret_cast<volatile u64 *>(batch->jobs[i].done) = batch->jobs[i].seq;
	__threadfence_system(); // after its own words the host may take away what the others are in
	for (u32 i = 0; i < GRAPH_SLOTS; i++)
		if (batch->n[i])
			*reinterpret_cast<volatile u64 *>(batch->jobs[i].own) = batch->jobs[i].ticket;
}
