/* The rings of board.h. The other side's words are read once with acquire and checked against private copies of
 * this side's words. A record is copied before it is checked and used.
 */
#include <string.h>

#include "internal.h"

static uint64_t load64(const uint64_t *p)
{
	return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

void kvs_ring_attach(struct kvs_ring_end *end, struct kvs_ring *ring, uint64_t data_bytes)
{
	memset(end, 0, sizeof *end);
	end->ring = ring;
	end->data = (uint8_t *)(ring + 1);
	end->bytes = data_bytes;
}

int kvs_ring_push(struct kvs_ring_end *e, uint16_t type, uint16_t status, uint64_t lease, uint64_t epoch, const void *body,
                  uint32_t bytes)
{
	uint64_t length = (sizeof(struct kvs_record) + (uint64_t)bytes + 7) & ~7ull;
	if (length > KVS_RECORD_MAX_BYTES || length > e->bytes / 2)
		return KVS_E_TOO_BIG;
	uint64_t pos = e->head & (e->bytes - 1), rest = e->bytes - pos;
	uint64_t need = rest < length ? rest + length : length;
	if (e->bytes - (e->head - e->tail) < need) {
		uint64_t tail = load64(&e->ring->tail);
		/* It may only have moved towards the head, by whole records. */
		if (tail - e->tail > e->head - e->tail || tail % 8)
			return KVS_E_ARG;
		e->tail = tail;
		if (e->bytes - (e->head - tail) < need)
			return KVS_E_FULL;
	}
	if (rest < length) {
		uint32_t pad[2] = {(uint32_t)rest, KVS_REC_PAD};
		memcpy(e->data + pos, pad, sizeof pad);
		e->head += rest;
		pos = 0;
	}
	struct kvs_record rec = {
		.length = (uint32_t)length,
		.type = type,
		.status = status,
		.seq = ++e->seq,
		.lease = lease,
		.epoch = epoch,
		.body_bytes = bytes,
	};
	memcpy(e->data + pos, &rec, sizeof rec);
	if (bytes)
		memcpy(e->data + pos + sizeof rec, body, bytes);
	e->head += length;
	/* Sequentially consistent, because kvs_ring_wake reads `sleeping` after it, in an order that the consumer sees too. */
	__atomic_store_n(&e->ring->head, e->head, __ATOMIC_SEQ_CST);
	return 0;
}

int kvs_ring_wake(struct kvs_ring_end *e)
{
	if (!__atomic_load_n(&e->ring->sleeping, __ATOMIC_SEQ_CST))
		return 0;
	return __atomic_exchange_n(&e->ring->sleeping, 0, __ATOMIC_SEQ_CST) == 1;
}

int64_t kvs_ring_pop(struct kvs_ring_end *e, void *buf, uint64_t cap)
{
	for (;;) {
		uint64_t head = load64(&e->ring->head);
		uint64_t avail = head - e->tail;
		if (!avail)
			return 0;
		if (avail > e->bytes || head % 8 || avail < 8)
			return KVS_E_ARG;
		uint64_t pos = e->tail & (e->bytes - 1), rest = e->bytes - pos;
		struct {
			uint32_t length;
			uint16_t type, status;
		} first;
		_Static_assert(sizeof first == 8, "the part of a record that a PAD has");
		memcpy(&first, e->data + pos, sizeof first);
		if (first.type == KVS_REC_PAD) {
			/* A pad never fills a whole ring: pads in a row would be an endless loop. */
			if (!pos || first.length != rest || first.length > avail)
				return KVS_E_ARG;
			e->tail += first.length;
			__atomic_store_n(&e->ring->tail, e->tail, __ATOMIC_RELEASE);
			continue;
		}
		struct kvs_record rec;
		if (avail < sizeof rec || rest < sizeof rec)
			return KVS_E_ARG;
		memcpy(&rec, e->data + pos, sizeof rec);
		if (rec.length > avail || rec.length > rest || rec.length > e->bytes / 2 || rec.length > KVS_RECORD_MAX_BYTES ||
		    rec.length != ((sizeof rec + (uint64_t)rec.body_bytes + 7) & ~7ull) || rec.seq != e->seq + 1)
			return KVS_E_ARG;
		uint64_t size = sizeof rec + rec.body_bytes;
		if (size > cap)
			return KVS_E_BUFFER;
		memcpy(buf, &rec, sizeof rec);
		memcpy((uint8_t *)buf + sizeof rec, e->data + pos + sizeof rec, rec.body_bytes);
		e->seq++;
		e->tail += rec.length;
		__atomic_store_n(&e->ring->tail, e->tail, __ATOMIC_RELEASE);
		return (int64_t)size;
	}
}

int kvs_ring_sleep(struct kvs_ring_end *e)
{
	__atomic_store_n(&e->ring->sleeping, 1, __ATOMIC_SEQ_CST);
	if (__atomic_load_n(&e->ring->head, __ATOMIC_SEQ_CST) == e->tail)
		return 1;
	__atomic_store_n(&e->ring->sleeping, 0, __ATOMIC_SEQ_CST);
	return 0;
}
