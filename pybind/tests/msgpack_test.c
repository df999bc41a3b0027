/* msgpack_test: the bounded reader against every prefix and random damage of a body that has all types in it, and the writer
 * against the reader. Inputs are heap copies of their exact size, so that a sanitizer sees a read behind them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define REQUIRE(x)                                                        \
	do {                                                              \
		if (!(x)) {                                               \
			fprintf(stderr, "line %d: %s\n", __LINE__, #x);   \
			exit(1);                                          \
		}                                                         \
	} while (0)

static void walk(const uint8_t *data, size_t n, int expect)
{
	uint8_t *copy = malloc(n ? n : 1);
	memcpy(copy, data, n);
	int ok = mp_is_map(copy, n);
	if (expect >= 0)
		REQUIRE(ok == expect);
	size_t off, len;
	if (mp_find(copy, n, "deadline_ms", &off, &len))
		REQUIRE(off + len <= n && len > 0);
	struct mpr r = mpr_make(copy, n);
	uint32_t count;
	if (mpr_map(&r, &count)) {
		while (count-- && !r.bad) {
			const char *s;
			const uint8_t *p;
			uint32_t m;
			uint64_t v;
			bool b;
			mpr_str(&r, &s, &m);
			struct mpr t = r;
			mpr_uint(&t, &v);
			t = r, mpr_bin(&t, &p, &m);
			t = r, mpr_bool(&t, &b);
			t = r, mpr_array(&t, &m);
			mpr_skip(&r);
		}
	}
	free(copy);
}

int main(void)
{
	static const uint64_t numbers[] = {0, 127, 128, 255, 256, 65535, 65536, UINT32_MAX, 1ull << 32, UINT64_MAX};
	static const size_t widths[] = {1, 1, 2, 2, 3, 3, 5, 5, 9, 9};
	for (int i = 0; i < 10; i++) {
		struct mpw w = {0};
		mpw_uint(&w, numbers[i]);
		REQUIRE(!w.bad && w.len == widths[i]);
		struct mpr r = mpr_make(w.buf, w.len);
		uint64_t v;
		REQUIRE(mpr_uint(&r, &v) && v == numbers[i] && r.p == r.end);
		mpw_free(&w);
	}
	/* The signed forms that other writers use. */
	static const uint8_t i8[] = {0xd0, 5}, neg[] = {0xff}, i64[] = {0xd3, 0x80, 0, 0, 0, 0, 0, 0, 0};
	uint64_t v;
	struct mpr r = mpr_make(i8, 2);
	REQUIRE(mpr_uint(&r, &v) && v == 5);
	r = mpr_make(neg, 1);
	REQUIRE(!mpr_uint(&r, &v) && r.bad);
	r = mpr_make(i64, 9);
	REQUIRE(!mpr_uint(&r, &v));

	struct mpw w = {0};
	char text[70000];
	memset(text, 'x', sizeof text);
	mpw_map(&w, 19);
	for (int i = 0; i < 10; i++) {
		char key[16];
		snprintf(key, sizeof key, "n%d", i);
		mpw_str(&w, key);
		mpw_uint(&w, numbers[i]);
	}
	static const size_t lengths[] = {31, 32, 255, 256};
	for (int i = 0; i < 4; i++) {
		char key[16];
		snprintf(key, sizeof key, "s%d", i);
		mpw_str(&w, key);
		mpw_strn(&w, text, lengths[i]);
	}
	mpw_str(&w, "bin");
	mpw_bin(&w, text, 300);
	mpw_str(&w, "deadline_ms");
	mpw_uint(&w, 30000);
	mpw_str(&w, "array");
	mpw_array(&w, 17);
	for (int i = 0; i < 17; i++)
		mpw_bool(&w, i & 1);
	static const uint8_t odd[] = {0x93, 0xc0, 0xca, 1, 2, 3, 4, 0xd7, 9, 1, 2, 3, 4, 5, 6, 7, 8};
	mpw_str(&w, "odd");
	mpw_raw(&w, odd, sizeof odd);
	mpw_str(&w, "long");
	mpw_strn(&w, text, 66000);
	REQUIRE(!w.bad);
	walk(w.buf, w.len, 1);
	size_t off, len;
	REQUIRE(mp_find(w.buf, w.len, "deadline_ms", &off, &len) && len == 3 && w.buf[off] == 0xcd);
	REQUIRE(!mp_find(w.buf, w.len, "absent", &off, &len));
	size_t step = 1;
	for (size_t n = 0; n < w.len; n += step, step = n > 1200 ? 997 : 1)
		walk(w.buf, n, 0);
	/* Damage, on the short front part: it has all the types. */
	size_t n = 1200;
	uint64_t rng = 88172645463325252ull;
	for (int round = 0; round < 20000; round++) {
		uint8_t copy[1200];
		memcpy(copy, w.buf, n);
		for (int k = 0; k < 3; k++) {
			rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
			copy[rng % n] = (uint8_t)(rng >> 32);
		}
		walk(copy, n, -1);
	}
	/* Counts and lengths far beyond the input, and nesting as deep as it is long. */
	static const uint8_t bombs[][6] = {{0xdf, 255, 255, 255, 255, 0}, {0x81, 0xdd, 255, 255, 255, 255}, {0xdb, 255, 255, 255, 255, 0}, {0xc1}};
	for (int i = 0; i < 4; i++)
		walk(bombs[i], sizeof bombs[i], 0);
	uint8_t *deep = malloc(1 << 20);
	memset(deep, 0x91, 1 << 20);
	walk(deep, 1 << 20, 0);
	deep[0] = 0x81;
	deep[1] = 0xa0;
	deep[(1 << 20) - 1] = 0;
	walk(deep, 1 << 20, 1);
	free(deep);
	mpw_free(&w);
	puts("ok");
	return 0;
}
