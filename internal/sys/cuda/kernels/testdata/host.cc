// SPDX-License-Identifier: Apache-2.0
//
// The kernels as a host's compiler understands them, one thread after the other: none of them waits for another, so that the order makes
// no difference. Random strided runs of one axis and of two, each forwards or backwards, are packed and unpacked and compared with copies one by one.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
struct dim {
	unsigned x;
};
static dim threadIdx, blockIdx, blockDim, gridDim;
struct alignas(16) uint4 {
	unsigned w[4];
};
static inline uint4 __ldcs(const uint4 *p) { return *p; }
static inline void __stcs(uint4 *p, uint4 v) { *p = v; }
static inline void __threadfence_system() {}
static inline void __syncthreads() {}
static inline unsigned long long atomicMax(unsigned long long *p, unsigned long long n)
{
	const unsigned long long was = *p;
	*p = was > n ? was : n;
	return was;
}
static inline unsigned atomicAdd(unsigned *p, unsigned n) { return (*p += n) - n; }

#include "../kernels.cu"

template <typename F> static void launch(unsigned grid, unsigned block, F kernel)
{
	gridDim.x = grid;
	blockDim.x = block;
	for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
		for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++)
			kernel();
}

static const size_t cells = 2048, cell = 1024;
alignas(16) static unsigned char memory[cells * cell], wanted[cells * cell], dense[cells * cell], packed[cells * cell];

static void check(bool ok, const char *what, int round)
{
	if (!ok) {
		std::printf("round %d: %s\n", round, what);
		std::exit(1);
	}
}

// Lists in every slot, of all four kinds, armed, revoked or left from before: what is armed and not revoked is moved once, and only that.
static unsigned long graphs(std::mt19937_64 &rng)
{
	auto below = [&](unsigned n) { return (unsigned)(rng() % n); };
	kvs_graph_slot slots[GRAPH_SLOTS] = {};
	kvs_graph_seen seen = {};
	kvs_graph_batch batch = {};
	u64 flag = 0, step = 0, pulse = 0, ticket = 0, own[GRAPH_SLOTS] = {}, done[GRAPH_SLOTS] = {};
	unsigned long moved = 0;
	const u32 len = 512, pieces = 6;
	for (int round = 0; round < 400; round++) {
		bool due[GRAPH_SLOTS];
		u64 bases[GRAPH_SLOTS][pieces];
		kvs_run runs[GRAPH_SLOTS];
		u32 first[GRAPH_SLOTS][2];
		for (size_t i = 0; i < sizeof memory; i += 8) {
			const u64 word = rng();
			std::memcpy(memory + i, &word, 8);
			std::memcpy(dense + i, &word, 7);
		}
		std::memcpy(wanted, memory, sizeof memory);
		std::memcpy(packed, dense, sizeof dense);
		for (u32 i = 0; i < GRAPH_SLOTS; i++) {
			kvs_graph_slot &s = slots[i];
			const u32 how = below(4); // 0: as before, 1: revoked, else: armed
			if ((due[i] = how > 1) || how == 1) {
				// A slot has sixteen cells of its own, and a part of the dense side.
				const size_t cells0 = 16 * i, dense0 = i * pieces * len;
				const bool uniform = below(2), unpack = below(2);
				for (u32 k = 0; k < pieces; k++) {
					bases[i][k] = (u64)(memory + (cells0 + (uniform ? (k * 5 + 3) % 16 : 2 * k + 1)) * cell);
					unsigned char *scattered = wanted + (bases[i][k] - (u64)memory), *dense_at = packed + dense0 + k * len;
					if (due[i])
						std::memcpy(unpack ? scattered : dense_at, unpack ? dense_at : scattered, len);
				}
				runs[i] = {bases[i][0], 2 * cell, 0, (u64)(dense + dense0), len, pieces};
				first[i][0] = 0;
				first[i][1] = pieces;
				s.list = uniform ? (u64)bases[i] : (u64)&runs[i];
				s.first = (u64)first[i];
				s.n = uniform ? pieces : 1;
				s.dense = (u64)(dense + dense0);
				s.len = uniform ? len : 0;
				s.unpack = unpack;
				s.own = (u64)&own[i];
				s.done = (u64)&done[i];
				s.seq = 1000 + ticket;
				s.armed = ++ticket;
				if (how == 1)
					s.revoked = ticket;
			}
		}
		step++;
		launch(1, GRAPH_SLOTS, [&] { kvs_graph_take(&step, &flag, &pulse, slots, &seen, &batch); });
		launch(1 + below(9), 64, [&] { kvs_graph_move(&batch); });
		check(flag == step && pulse == step, "graph: the layer's flag, or the pulse", round);
		check(!std::memcmp(memory, wanted, sizeof memory) && !std::memcmp(dense, packed, sizeof dense), "graph: bytes differ, or others were written", round);
		for (u32 i = 0; i < GRAPH_SLOTS; i++) {
			const kvs_graph_slot &s = slots[i];
			check(s.taken == s.armed, "graph: a list was not taken", round);
			check(s.armed == 0 || (s.revoked == s.armed ? s.skipped == s.armed : own[i] == s.armed && done[i] == s.seq), "graph: how a list ended", round);
			moved += due[i];
		}
	}
	return moved;
}

int main()
{
	std::mt19937_64 rng(7);
	auto below = [&](unsigned n) { return (unsigned)(rng() % n); };
	unsigned long strided = 0, grids = 0;
	for (int round = 0; round < 60; round++) {
		for (size_t i = 0; i < sizeof memory; i += 8) {
			const u64 word = rng();
			std::memcpy(memory + i, &word, 8);
		}
		std::memset(dense, 0xee, sizeof dense);
		std::memset(packed, 0xee, sizeof packed);
		std::vector<kvs_run> runs;
		std::vector<u32> first;
		u32 pieces = 0;
		size_t at = 0, used = 0; // cells taken, bytes packed
		struct place {
			u64 at;
			size_t dense;
			u32 len;
		};
		std::vector<place> places; // of pieces, one by one
		while (runs.size() < 1 + below(40)) {
			const u32 step = 1 + below(3), len = 16 * (1 + below(cell / 16));
			const u32 count = below(3) == 0 ? 1 : 1 + below(30), rows = below(2) ? 1 : 1 + below(6), n = rows * count;
			if (at + (size_t)n * step > cells)
				break;
			// One row behind the other, or one within the other as where heads and tokens lie crosswise.
			const bool across = below(2);
			u64 base = (u64)(memory + at * cell), stride = (across ? rows : 1) * step * cell, outer = (across ? 1 : count) * step * cell;
			if (below(2)) { // backwards
				base += (count - 1) * stride;
				stride = -stride;
			}
			if (below(2)) {
				base += (rows - 1) * outer;
				outer = -outer;
			}
			strided += count > 1;
			grids += count > 1 && rows > 1;
			runs.push_back({base, stride, outer, (u64)(dense + used), len, count});
			first.push_back(pieces);
			for (u32 r = 0; r < rows; r++)
				for (u32 c = 0; c < count; c++)
					places.push_back({base + r * outer + c * stride, used + ((size_t)r * count + c) * len, len});
			for (u32 i = pieces; i < pieces + n; i++)
				std::memcpy(packed + places[i].dense, (const void *)places[i].at, len);
			pieces += n;
			used += (size_t)n * len;
			at += (size_t)n * step;
		}
		first.push_back(pieces);
		const unsigned grid = 1 + below(70), block = 32 * (1 + below(8));
		launch(grid, block, [&] { kvs_pack_v4(runs.data(), first.data(), runs.size()); });
		check(!std::memcmp(dense, packed, sizeof dense), "packed bytes differ, or others were written", round);
		std::memcpy(wanted, memory, sizeof memory);
		for (size_t i = 0; i < used; i++)
			dense[i] ^= 0x5a;
		for (const place &p : places)
			std::memcpy(wanted + (p.at - (u64)memory), dense + p.dense, p.len);
		launch(grid, block, [&] { kvs_unpack_v4(runs.data(), first.data(), runs.size()); });
		check(!std::memcmp(memory, wanted, sizeof memory), "unpacked bytes differ, or others were written", round);

		std::vector<u64> bases;
		const u64 len = 16 * (1 + below(cell / 16)), n = 1 + below(cells);
		for (u64 i = 0; i < n; i++)
			bases.push_back((u64)(memory + (i * 1021 % cells) * cell)); // 1021 and the number of cells have no common factor
		std::memset(dense, 0xee, sizeof dense);
		std::memset(packed, 0xee, sizeof packed);
		for (u64 i = 0; i < n; i++)
			std::memcpy(packed + i * len, (const void *)bases[i], len);
		launch(grid, block, [&] { kvs_pack_uniform_v4(bases.data(), n, (u64)dense, len); });
		check(!std::memcmp(dense, packed, sizeof dense), "uniform blocks: packed bytes differ", round);
		std::memcpy(wanted, memory, sizeof memory);
		for (u64 i = 0; i < n * len; i++)
			dense[i] ^= 0xa5;
		for (u64 i = 0; i < n; i++)
			std::memcpy(wanted + (bases[i] - (u64)memory), dense + i * len, len);
		launch(grid, block, [&] { kvs_unpack_uniform_v4(bases.data(), n, (u64)dense, len); });
		check(!std::memcmp(memory, wanted, sizeof memory), "uniform blocks: unpacked bytes differ", round);
	}
	check(strided > 200 && grids > 50, "hardly a run has more than one piece, or more than one row", 0);
	const unsigned long moved = graphs(rng);
	check(moved > 1000, "hardly a list was moved by graphs", 0);
	std::printf("%lu strided runs, %lu of rows, %lu lists by graphs\n", strided, grids, moved);
	return 0;
}
