// SPDX-License-Identifier: Apache-2.0
//
// The kernels as a host's compiler understands them, one thread after the other: none of them waits for another, so that the order makes
// no difference. Random strided runs, forwards and backwards, are packed and unpacked and compared with copies one by one.

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

int main()
{
	std::mt19937_64 rng(7);
	auto below = [&](unsigned n) { return (unsigned)(rng() % n); };
	unsigned long strided = 0;
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
		bool same = true;
		while (runs.size() < 1 + below(40)) {
			const u32 step = 1 + below(3), len = 16 * (1 + below(cell / 16));
			u32 count = below(3) == 0 ? 1 : 1 + below(30);
			if (at + (size_t)count * step > cells)
				break;
			u64 base = (u64)(memory + at * cell), stride = step * cell;
			if (count > 1 && below(2)) { // backwards
				base += (count - 1) * stride;
				stride = -stride;
			}
			same = same && count == 1 && (runs.empty() || runs[0].len == len);
			strided += count > 1;
			runs.push_back({base, stride, (u64)(dense + used), len, count});
			first.push_back(pieces);
			for (u32 i = 0; i < count; i++)
				std::memcpy(packed + used + (size_t)i * len, (const void *)(base + i * stride), len);
			pieces += count;
			used += (size_t)count * len;
			at += (size_t)count * step;
		}
		first.push_back(pieces);
		const unsigned grid = 1 + below(70), block = 32 * (1 + below(8));
		launch(grid, block, [&] { kvs_pack_v4(runs.data(), first.data(), runs.size()); });
		check(!std::memcmp(dense, packed, sizeof dense), "packed bytes differ, or others were written", round);
		std::memcpy(wanted, memory, sizeof memory);
		for (size_t i = 0; i < used; i++)
			dense[i] ^= 0x5a;
		for (const kvs_run &r : runs)
			for (u64 i = 0; i < r.count; i++)
				std::memcpy(wanted + (r.base + i * r.stride - (u64)memory), (const void *)(r.dense + i * r.len), r.len);
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
	check(strided > 200, "hardly a run has more than one piece", 0);
	std::printf("%lu strided runs\n", strided);
	return 0;
}
