/* The table of leases: open ones, and those whose end the engine has not fetched. */
#include <stdlib.h>

#include "client.h"

static void list_add(struct lease_list *l, struct lease *x)
{
	x->next = NULL;
	x->prev = l->last;
	if (l->last)
		l->last->next = x;
	else
		l->first = x;
	l->last = x;
}

static void list_del(struct lease_list *l, struct lease *x)
{
	if (x->prev)
		x->prev->next = x->next;
	else
		l->first = x->next;
	if (x->next)
		x->next->prev = x->prev;
	else
		l->last = x->prev;
}

struct lease *lease_find(kvs_client *c, uint64_t id)
{
	struct lease *l = c->buckets[id % BUCKETS];
	while (l && l->id != id)
		l = l->hash_next;
	return l;
}

void lease_free(struct lease *l)
{
	free(l->snap);
	free(l->body);
	free(l);
}

void lease_add(kvs_client *c, struct lease *l)
{
	l->hash_next = c->buckets[l->id % BUCKETS];
	c->buckets[l->id % BUCKETS] = l;
	list_add(&c->open, l);
	c->lease_count++;
	c->copy_count += is_copy(l->type);
}

void lease_delivered(kvs_client *c, struct lease *l)
{
	list_del(&c->ready, l);
	c->ready_count--;
	struct lease **at = &c->buckets[l->id % BUCKETS];
	while (*at != l)
		at = &(*at)->hash_next;
	*at = l->hash_next;
	c->lease_count--;
	c->copy_count -= is_copy(l->type);
	lease_free(l);
}

void lease_ready(kvs_client *c, struct lease *l)
{
	list_del(&c->open, l);
	list_add(&c->ready, l);
	c->ready_count++;
	if (l->landing) {
		l->landing->ended = true;
		l->landing = NULL;
		landings_settle(c);
	}
}

void lease_end(kvs_client *c, struct lease *l, uint16_t status, const char *reason)
{
	struct mpw w = {0};
	mpw_reason(&w, reason, SIZE_MAX);
	l->done = true;
	l->status = status;
	l->synthesised = true;
	if (w.bad) {
		mpw_free(&w);
	} else {
		l->body = w.buf;
		l->body_bytes = (uint32_t)w.len;
	}
	lease_ready(c, l);
}

/* A process has left the lease's set. `status` is what the engine gets if nothing else ends the lease. True: it moved to the
 * ready list. */
static bool lease_unbind(kvs_client *c, struct lease *l, uint32_t gone, uint16_t status, const char *reason)
{
	if (!(l->bound & gone))
		return false;
	l->bound &= ~gone;
	if (l->bound)
		return false;
	if (l->done)
		lease_ready(c, l);
	else if (l->type != KVS_REC_INTENT || l->cancelled)
		lease_end(c, l, status == KVS_FAILED && l->cancelled ? KVS_CANCELLED : status, reason);
	else
		return false; /* a source lease waits for a new session, or for its deadline */
	return true;
}

void leases_unbind(kvs_client *c, uint32_t gone, uint16_t status, const char *reason)
{
	bool any = false;
	for (struct lease *l = c->open.first, *next; l; l = next) {
		next = l->next;
		any |= lease_unbind(c, l, gone, status, reason);
	}
	if (any)
		kvs_wake(c->cq_eventfd);
}
