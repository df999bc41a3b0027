/* digest_test: the sums of AVX2 against the plain ones, for every length, any alignment and the largest numbers. Inputs are heap
 * copies of their exact size, so that a sanitizer sees a read behind them. */
#include "../src/digest.c"

#include "require.h"

int main(void)
{
#ifdef __x86_64__
	const uint64_t seed[2] = {1, 2};
	if (!__builtin_cpu_supports("avx2")) {
		puts("no avx2");
		return 0;
	}
	for (uint64_t round = 0; round < 4; round++)
		for (uint64_t n = 0; n < 100; n++) {
			uint64_t *low = calloc(n + 1, 8), *high = calloc(n + 1, 8);
			uint8_t *p = malloc(4 * n + round);
			REQUIRE(low && high && p);
			for (uint64_t i = 0; i < n; i++) {
				uint64_t w = round ? weight(seed, AXIS_WORD, i + round, "") : (UINT64_C(1) << 60) - 1;
				low[i] = w & ((1u << HALF_BITS) - 1);
				high[i] = w >> HALF_BITS;
			}
			for (uint64_t i = 0; i < 4 * n + round; i++)
				p[i] = (uint8_t)(round ? weight(seed, AXIS_ROW, i, "") : 0xff);
			REQUIRE(mod(dot4_avx2(low, high, p + round, n)) == mod(dot4_plain(low, high, p + round, n)));
			REQUIRE(mod(dot2_avx2(low, high, p + round, n)) == mod(dot2_plain(low, high, p + round, n)));
			free(low);
			free(high);
			free(p);
		}
#endif
	puts("ok");
	return 0;
}
