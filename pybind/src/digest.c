/* The content digest of a KV cache in this process's memory: docs/content-digest.md. layout/digest is the same in Go. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define PRIME ((UINT64_C(1) << 61) - 1)
#define HALF_BITS 30 /* of a weight */
#define MAX_UNIT_BYTES (4u << 20)
#define MAX_HEADS (1u << 20)
#define MAX_BLOCK_ROWS (1u << 20)
#define MAX_ROWS (1u << 22) /* of a sequence: 64 MiB of weights */

typedef unsigned __int128 wide;

enum axis { AXIS_WORD = 1, AXIS_ROW, AXIS_HEAD, AXIS_PLANE };

/* The weights of the first positions of an axis, in halves, so that four products with 32 bits fit into 64. */
struct weights {
	uint64_t *low, *high;
	uint64_t count;
};

/* The sum of n successive numbers of memory, each with its weight, below 2^62. */
typedef uint64_t (*dot_function)(const uint64_t *low, const uint64_t *high, const uint8_t *p, uint64_t n);

struct kvs_digest {
	uint64_t seed[2];
	struct weights words, rows, heads;
	dot_function dot4, dot2; /* numbers of 4 and of 2 bytes */
};

/* x modulo the prime, not fully reduced: below 2^62 if x is below 2^122, below 2^63 if x is below 2^123. */
static inline uint64_t fold(wide x)
{
	return (uint64_t)(x & PRIME) + (uint64_t)(x >> 61);
}

static uint64_t mod(wide x)
{
	uint64_t s = fold(fold(x));
	return s >= PRIME ? s - PRIME : s;
}

static inline uint64_t times(uint64_t weight, uint64_t x)
{
	return fold((wide)weight * x);
}

/* ---- weights: SipHash-2-4 ---- */

static uint64_t rotated(uint64_t x, int n)
{
	return x << n | x >> (64 - n);
}

static void sip_round(uint64_t v[4])
{
	v[0] += v[1];
	v[1] = rotated(v[1], 13) ^ v[0];
	v[0] = rotated(v[0], 32);
	v[2] += v[3];
	v[3] = rotated(v[3], 16) ^ v[2];
	v[0] += v[3];
	v[3] = rotated(v[3], 21) ^ v[0];
	v[2] += v[1];
	v[1] = rotated(v[1], 17) ^ v[2];
	v[2] = rotated(v[2], 32);
}

static void sip_word(uint64_t v[4], uint64_t m)
{
	v[3] ^= m;
	sip_round(v);
	sip_round(v);
	v[0] ^= m;
}

/* The weight of a position of an axis; text: the rest of the position's name. */
static uint64_t weight(const uint64_t seed[2], enum axis axis, uint64_t position, const char *text)
{
	uint64_t v[4] = {seed[0] ^ UINT64_C(0x736f6d6570736575), seed[1] ^ UINT64_C(0x646f72616e646f6d),
		seed[0] ^ UINT64_C(0x6c7967656e657261), seed[1] ^ UINT64_C(0x7465646279746573)};
	size_t n = strlen(text);
	uint64_t last = (16 + n) << 56;
	sip_word(v, axis);
	sip_word(v, position);
	for (; n >= 8; n -= 8, text += 8) {
		uint64_t m;
		memcpy(&m, text, 8);
		sip_word(v, m);
	}
	for (size_t i = 0; i < n; i++)
		last |= (uint64_t)(uint8_t)text[i] << (8 * i);
	sip_word(v, last);
	v[2] ^= 0xff;
	for (int i = 0; i < 4; i++)
		sip_round(v);
	uint64_t w = (v[0] ^ v[1] ^ v[2] ^ v[3]) >> 4;
	return w ? w : 1;
}

static uint64_t weight_at(const struct weights *w, uint64_t i)
{
	return w->low[i] | w->high[i] << HALF_BITS;
}

static bool extend(const uint64_t seed[2], struct weights *w, enum axis axis, uint64_t count)
{
	if (count <= w->count)
		return true;
	uint64_t *low = realloc(w->low, count * sizeof *low);
	if (low)
		w->low = low;
	uint64_t *high = realloc(w->high, count * sizeof *high);
	if (high)
		w->high = high;
	if (!low || !high)
		return false;
	for (uint64_t i = w->count; i < count; i++) {
		uint64_t x = weight(seed, axis, i, "");
		low[i] = x & ((1u << HALF_BITS) - 1);
		high[i] = x >> HALF_BITS;
	}
	w->count = count;
	return true;
}

static void discard(struct weights *w)
{
	free(w->low);
	free(w->high);
}

/* ---- sums of products ---- */

static inline uint64_t dot_plain(const uint64_t *low, const uint64_t *high, const uint8_t *p, uint64_t n, int bytes)
{
	wide sum = 0;
	for (uint64_t i = 0; i < n; i++) {
		uint32_t x = 0;
		memcpy(&x, p + (uint64_t)bytes * i, (size_t)bytes);
		sum += (wide)(low[i] | high[i] << HALF_BITS) * x;
	}
	return fold(sum);
}

static uint64_t dot4_plain(const uint64_t *low, const uint64_t *high, const uint8_t *p, uint64_t n)
{
	return dot_plain(low, high, p, n, 4);
}

static uint64_t dot2_plain(const uint64_t *low, const uint64_t *high, const uint8_t *p, uint64_t n)
{
	return dot_plain(low, high, p, n, 2);
}

#ifdef __x86_64__
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))

/* Sums of products with the low and the high halves, as halves of 32 bits: they cannot overflow. */
struct lanes {
	__m256i low, low_top, high, high_top;
};

AVX2 static inline void keep(struct lanes *s, __m256i low, __m256i high)
{
	__m256i mask = _mm256_set1_epi64x(UINT32_MAX);
	s->low = _mm256_add_epi64(s->low, _mm256_and_si256(low, mask));
	s->low_top = _mm256_add_epi64(s->low_top, _mm256_srli_epi64(low, 32));
	s->high = _mm256_add_epi64(s->high, _mm256_and_si256(high, mask));
	s->high_top = _mm256_add_epi64(s->high_top, _mm256_srli_epi64(high, 32));
}

AVX2 static inline wide across(__m256i x)
{
	uint64_t v[4];
	_mm256_storeu_si256((__m256i *)v, x);
	return (wide)v[0] + v[1] + v[2] + v[3];
}

AVX2 static inline __m256i four(const uint8_t *p, int bytes)
{
	if (bytes == 4)
		return _mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i *)p));
	return _mm256_cvtepu16_epi64(_mm_loadl_epi64((const __m128i *)p));
}

AVX2 static inline uint64_t dot_avx2(const uint64_t *low, const uint64_t *high, const uint8_t *p, uint64_t n, int bytes)
{
	struct lanes s = {0};
	uint64_t i = 0;
	while (i + 4 <= n) {
		__m256i l = _mm256_setzero_si256(), h = l;
		/* Four products of 62 bits fit into 64. */
		for (int k = 0; k < 4 && i + 4 <= n; k++, i += 4) {
			__m256i x = four(p + (uint64_t)bytes * i, bytes);
			l = _mm256_add_epi64(l, _mm256_mul_epu32(x, _mm256_loadu_si256((const __m256i *)(low + i))));
			h = _mm256_add_epi64(h, _mm256_mul_epu32(x, _mm256_loadu_si256((const __m256i *)(high + i))));
		}
		keep(&s, l, h);
	}
	wide sum = across(s.low) + (across(s.low_top) << 32);
	sum += (across(s.high) + (across(s.high_top) << 32)) << HALF_BITS;
	uint64_t rest = dot_plain(low + i, high + i, p + (uint64_t)bytes * i, n - i, bytes);
	return fold(sum + rest);
}

AVX2 static uint64_t dot4_avx2(const uint64_t *low, const uint64_t *high, const uint8_t *p, uint64_t n)
{
	return dot_avx2(low, high, p, n, 4);
}

AVX2 static uint64_t dot2_avx2(const uint64_t *low, const uint64_t *high, const uint8_t *p, uint64_t n)
{
	return dot_avx2(low, high, p, n, 2);
}
#endif

/* ---- units ---- */

/* The weight of byte `at` of a unit. */
static uint64_t byte_weight(const struct weights *words, uint64_t at)
{
	return mod((wide)weight_at(words, at / 4) << (8 * (at % 4)));
}

/* The sum of n bytes from byte `at` of a unit on. */
static uint64_t dot_bytes(const kvs_digest *d, uint64_t at, const uint8_t *p, uint64_t n)
{
	wide sum = 0;
	for (; n > 0 && at % 4 != 0; n--, at++)
		sum += (wide)byte_weight(&d->words, at) * *p++;
	sum += d->dot4(d->words.low + at / 4, d->words.high + at / 4, p, n / 4);
	for (uint64_t i = n / 4 * 4; i < n; i++)
		sum += (wide)byte_weight(&d->words, at + i) * p[i];
	return fold(sum);
}

/* The memory of a call. */
struct cache {
	const uint8_t *region;
	uint64_t bytes;
	const kvs_units *u;
	const uint32_t *table;
};

static const uint8_t *piece(const struct cache *c, uint64_t off, uint64_t n)
{
	return off <= c->bytes && n <= c->bytes - off ? c->region + off : NULL;
}

/* The sum of n rows of one kernel block, the first at an offset; false: outside of the region. */
typedef bool (*rows_function)(const kvs_digest *d, const struct cache *c, uint64_t at, uint64_t row, uint64_t n, uint64_t *sum);

/* Each unit is one piece, or one for each column. */
static bool sum_rows(const kvs_digest *d, const struct cache *c, uint64_t at, uint64_t row, uint64_t n, uint64_t *sum)
{
	const kvs_units *u = c->u;
	bool dense = u->cols == 1 || u->col == u->cell;
	uint64_t pieces = dense ? 1 : u->cols, size = dense ? u->cols * u->cell : u->cell;
	wide all = 0;
	for (uint64_t i = 0; i < n; i++, at += u->row) {
		wide heads = 0;
		for (uint64_t h = 0; h < u->heads; h++) {
			wide unit = 0;
			for (uint64_t k = 0; k < pieces; k++) {
				const uint8_t *p = piece(c, at + h * u->head + k * u->col, size);
				if (!p)
					return false;
				unit += dot_bytes(d, k * size, p, size);
			}
			heads += times(weight_at(&d->heads, u->first_head + h), fold(unit));
		}
		all += times(weight_at(&d->rows, row + i), fold(heads));
	}
	*sum = fold(all);
	return true;
}

/* Each column is one piece for all rows: transposed K. */
static bool sum_columns(const kvs_digest *d, const struct cache *c, uint64_t at, uint64_t row, uint64_t n, uint64_t *sum)
{
	const kvs_units *u = c->u;
	dot_function dot = u->cell == 4 ? d->dot4 : d->dot2;
	wide all = 0;
	for (uint64_t h = 0; h < u->heads; h++) {
		wide head = 0;
		for (uint64_t k = 0; k < u->cols; k++) {
			const uint8_t *p = piece(c, at + h * u->head + k * u->col, n * u->cell);
			if (!p)
				return false;
			head += times(byte_weight(&d->words, k * u->cell), dot(d->rows.low + row, d->rows.high + row, p, n));
		}
		all += times(weight_at(&d->heads, u->first_head + h), fold(head));
	}
	*sum = fold(all);
	return true;
}

static bool sum_units(const kvs_digest *d, const struct cache *c, uint64_t *sum)
{
	const kvs_units *u = c->u;
	bool columns = u->cols > 1 && u->row == u->cell && (u->cell == 2 || u->cell == 4);
	rows_function rows = columns ? sum_columns : sum_rows;
	uint64_t end = u->first_row + u->rows;
	wide all = 0;
	for (uint64_t row = u->first_row, n; row < end; row += n) {
		uint64_t tile = row / u->tile_rows, in_tile = row % u->tile_rows, part;
		uint64_t at = u->off + c->table[tile / u->tiles] * u->block + tile % u->tiles * u->tile + in_tile * u->row;
		n = u->tile_rows - in_tile;
		if (n > end - row)
			n = end - row;
		if (!rows(d, c, at, row, n, &part))
			return false;
		all += part;
	}
	*sum = mod((wide)weight(d->seed, AXIS_PLANE, u->role, u->layer) * fold(all));
	return true;
}

static bool possible(const kvs_units *u, uint32_t blocks)
{
	if (!u->layer || u->tile_rows == 0 || u->tile_rows > MAX_BLOCK_ROWS || u->tiles == 0 || u->tiles > MAX_BLOCK_ROWS)
		return false;
	if (u->cell == 0 || u->cols == 0 || u->cell > MAX_UNIT_BYTES || u->cols > MAX_UNIT_BYTES / u->cell)
		return false;
	if (u->heads > MAX_HEADS || u->first_head > MAX_HEADS || u->first_row > MAX_ROWS || u->rows > MAX_ROWS - u->first_row)
		return false;
	uint64_t in_block = u->tile_rows * u->tiles;
	return (u->first_row + u->rows + in_block - 1) / in_block <= blocks;
}

/* ---- calls ---- */

int kvs_digest_open(const uint8_t seed[KVS_DIGEST_SEED_BYTES], kvs_digest **out)
{
	if (!seed || !out)
		return KVS_E_ARG;
	kvs_digest *d = calloc(1, sizeof *d);
	if (!d)
		return KVS_E_SYS;
	memcpy(d->seed, seed, sizeof d->seed);
	d->dot4 = dot4_plain;
	d->dot2 = dot2_plain;
#ifdef __x86_64__
	if (__builtin_cpu_supports("avx2")) {
		d->dot4 = dot4_avx2;
		d->dot2 = dot2_avx2;
	}
#endif
	*out = d;
	return 0;
}

void kvs_digest_close(kvs_digest *d)
{
	if (!d)
		return;
	discard(&d->words);
	discard(&d->rows);
	discard(&d->heads);
	free(d);
}

int kvs_digest_weights(const kvs_digest *d, uint32_t axis, uint64_t first, uint64_t count, uint64_t *out)
{
	if (!d || !out || axis < AXIS_WORD || axis > AXIS_HEAD || first > MAX_ROWS || count > MAX_ROWS - first)
		return KVS_E_ARG;
	for (uint64_t i = 0; i < count; i++)
		out[i] = weight(d->seed, axis, first + i, "");
	return 0;
}

uint64_t kvs_digest_plane(const kvs_digest *d, uint32_t role, const char *layer)
{
	if (!d || !layer)
		return 0;
	return weight(d->seed, AXIS_PLANE, role, layer);
}

int kvs_digest_sum(kvs_digest *d, const void *region, uint64_t bytes, const kvs_units *u, const uint32_t *table, uint32_t blocks,
	uint64_t *sum)
{
	if (!d || !region || !u || !table || !sum || !possible(u, blocks))
		return KVS_E_ARG;
	if (!extend(d->seed, &d->words, AXIS_WORD, (u->cell * u->cols + 3) / 4) ||
		!extend(d->seed, &d->rows, AXIS_ROW, u->first_row + u->rows) ||
		!extend(d->seed, &d->heads, AXIS_HEAD, u->first_head + u->heads))
		return KVS_E_SYS;
	struct cache c = {region, bytes, u, table};
	return sum_units(d, &c, sum) ? 0 : KVS_E_ARG;
}
