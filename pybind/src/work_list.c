/* SPDX-License-Identifier: Apache-2.0
 *
 * Checks the sidecar's lists (board.h, "work") and writes them as addresses.
 */
#include "work_state.h"

/* Subtracts the span of an axis from the room on its side. False: there is less room. */
static bool reach(uint64_t *before, uint64_t *behind, uint64_t stride, uint32_t steps)
{
	bool back = stride >> 63;
	uint64_t *room = back ? before : behind, span;
	if (__builtin_mul_overflow(back ? -stride : stride, (uint64_t)steps, &span) || span > *room)
		return false;
	*room -= span;
	return true;
}

/* The pieces farthest apart are a sum of both axes. */
static bool within(const struct work_region *r, uint64_t off, const struct kvs_work_run *row, uint64_t outer, uint32_t rows)
{
	if (off > r->bytes || row->len > r->bytes - off)
		return false;
	uint64_t before = off, behind = r->bytes - off - row->len;
	return reach(&before, &behind, row->stride, row->count - 1) && reach(&before, &behind, outer, rows - 1);
}

bool work_translate(const struct work_region *regions, uint32_t n, const struct kvs_work_slot *slot, const struct kvs_work_run *from, uint64_t dense,
                    uint64_t dense_bytes, struct work_list *out)
{
	const uint64_t mask = ((uint64_t)1 << KVS_WORK_WHERE_BITS) - 1;
	uint64_t off = READ(slot->dense), bytes = READ(slot->bytes), used = 0;
	uint32_t runs = READ(slot->runs), pieces = 0, made = 0;
	bool uniform = true;
	if (!runs || runs > KVS_WORK_RUNS || off > dense_bytes || bytes > dense_bytes - off || off % KVS_WORK_ALIGN)
		return false;
	for (uint32_t i = 0; i < runs; i++, made++) {
		struct kvs_work_run r = {READ(from[i].where), READ(from[i].stride), READ(from[i].len), READ(from[i].count)}, rows = {.count = 1};
		if (r.count & KVS_WORK_ROWS) {
			if (++i == runs)
				return false;
			rows = (struct kvs_work_run){READ(from[i].where), READ(from[i].stride), READ(from[i].len), READ(from[i].count)};
			r.count -= KVS_WORK_ROWS;
			if (r.count < 2 || rows.count < 2 || rows.where || rows.len)
				return false;
		}
		uint64_t region = r.where >> KVS_WORK_WHERE_BITS, at = r.where & mask, count = (uint64_t)r.count * rows.count;
		if (region >= n || !r.len || !count || count > KVS_WORK_RUNS - pieces || (r.len | r.stride | rows.stride) % KVS_WORK_ALIGN)
			return false;
		uint64_t base = regions[region].addr + at;
		if (base % KVS_WORK_ALIGN || !within(&regions[region], at, &r, rows.stride, rows.count))
			return false;
		out->runs[made] = (struct work_run){base, r.stride, rows.stride, dense + off + used, r.len, r.count};
		out->bases[made] = base;
		out->first[made] = pieces;
		uniform = uniform && count == 1 && r.len == out->runs[0].len;
		pieces += (uint32_t)count;
		used += r.len * count; /* 2^44 at most, 2^12 times */
	}
	out->first[made] = pieces;
	out->count = made;
	out->len = uniform ? out->runs[0].len : 0;
	return used == bytes;
}
