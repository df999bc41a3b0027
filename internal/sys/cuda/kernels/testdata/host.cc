// The kernels as a host's compiler understands them, one thread after the other: none of them waits for another, so that the order makes
// no difference. Random strided runs of one axis and of two, each forwards or backwards, are packed and unpacked and compared with copies one by one,
// and so are runs that are moved.

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
	for (int round = 0; round < 60; round++) {
		// From the lower half of the cells to the upper one.
		for (size_t i = 0; i < sizeof memory; i += 8) {
			const u64 word = rng();
			std::memcpy(memory + i, &word, 8);
		}
		std::memcpy(wanted, memory, sizeof memory);
		std::vector<kvs_move> moves;
		std::vector<u32> first;
		u32 pieces = 0;
		size_t from = 0, to = cells / 2; // cells taken
		while (moves.size() < 1 + below(60)) {
			const u32 len = 16 * (1 + below(cell / 16)), count = below(3) == 0 ? 1 : 1 + below(30), a = 1 + below(3), b = 1 + below(3);
			if (from + (size_t)count * a > cells / 2 || to + (size_t)count * b > cells)
				break;
			kvs_move m = {(u64)(memory + from * cell), (u64)(memory + to * cell), a * cell, b * cell, len, count};
			if (below(2)) { // backwards on one side
				m.dst += (count - 1) * m.dst_stride;
				m.dst_stride = -m.dst_stride;
			}
			for (u64 i = 0; i < count; i++)
				std::memcpy(wanted + (m.dst + i * m.dst_stride - (u64)memory), (const void *)(m.src + i * m.src_stride), len);
			moves.push_back(m);
			first.push_back(pieces);
			pieces += count;
			from += (size_t)count * a;
			to += (size_t)count * b;
		}
		first.push_back(pieces);
		launch(1 + below(70), 32 * (1 + below(8)), [&] { kvs_move_v4(moves.data(), first.data(), moves.size()); });
		check(!std::memcmp(memory, wanted, sizeof memory), "moved bytes differ, or others were written", round);
	}
	check(strided > 200 && grids > 50, "hardly a run has more than one piece, or more than one row", 0);
	std::printf("%lu strided runs, %lu of rows\n", strided, grids);
	return 0;
}
