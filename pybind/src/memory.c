/* The regions that a client lends to the sidecar, and the packets that pass them. Regions of kvs_start have the numbers from 0 on, and stay until
 * kvs_replace; others come and go, and no number of theirs is used twice. Each session gets all of them, with the same numbers.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>

#include "client.h"

#define REGISTER_FDS (KVS_PACKET_MAX_FDS - BOARD_FDS)
#define WORK_FDS 2

/* ---- files ---- */

static int file_add(kvs_client *c, int fd)
{
	for (int i = 0; i < KVS_MAX_REGION_FILES; i++) {
		if (c->files[i].users)
			continue;
		c->files[i].fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
		if (c->files[i].fd < 0)
			return KVS_E_SYS;
		c->files[i].users = 1;
		return i;
	}
	log_error(c, "regions in more than %d files: lend parts of one memfd, or one region of a process", KVS_MAX_REGION_FILES);
	return KVS_E_LIMIT;
}

static void file_put(kvs_client *c, int i)
{
	if (i >= 0 && --c->files[i].users == 0)
		close_fd(&c->files[i].fd);
}

/* The file of all[i]. Descriptors with one number are one file only while they are open: during a call. */
static int file_of(kvs_client *c, const struct kvs_region *all, uint32_t i)
{
	const struct kvs_region *r = &all[i];
	const struct region *first = &c->regions[c->region_count - i];
	int file = -1;
	if (r->kind == KVS_REGION_DEVICE)
		return r->fd < 0 ? -1 : file_add(c, r->fd);
	for (uint32_t j = 0; j < i && file < 0; j++)
		if (all[j].kind != KVS_REGION_DEVICE && all[j].fd == r->fd)
			file = first[j].file;
	/* Each has this process's memory. */
	for (uint32_t j = 0; r->kind == KVS_REGION_PROCESS && j < c->region_count && file < 0; j++)
		if (c->regions[j].kind == KVS_REGION_PROCESS)
			file = c->regions[j].file;
	if (file < 0)
		return file_add(c, r->fd);
	c->files[file].users++;
	return file;
}

static void regions_cut(kvs_client *c, uint32_t count)
{
	while (c->region_count > count)
		file_put(c, c->regions[--c->region_count].file);
}

int regions_add(kvs_client *c, const struct kvs_region *all, uint32_t n)
{
	uint32_t before = c->region_count;
	if (n > KVS_MAX_REGIONS - before || n > MAX_REGION_NUMBER - c->next_region) {
		log_error(c, "%u regions, at most %d", before + n, KVS_MAX_REGIONS);
		return KVS_E_LIMIT;
	}
	struct region *more = realloc(c->regions, (before + n + 1) * sizeof *more);
	if (!more)
		return KVS_E_SYS;
	c->regions = more;
	for (uint32_t i = 0; i < n; i++) {
		const struct kvs_region *r = &all[i];
		int file = KVS_E_ARG;
		if (r->kind < KVS_REGION_MEMFD || r->kind > KVS_REGION_DEVICE)
			log_error(c, "region %u has kind %d, want 1..4", i, r->kind);
		else
			file = file_of(c, all, i);
		if (file < -1 || (file == -1 && r->kind != KVS_REGION_DEVICE)) {
			regions_cut(c, before);
			return file;
		}
		struct region *to = &c->regions[c->region_count++];
		*to = (struct region){.kind = r->kind, .file = file, .number = c->next_region + i, .addr = r->addr, .bytes = r->bytes, .offset = r->offset};
		memcpy(to->id, r->id, sizeof to->id);
		memcpy(to->handle, r->handle, sizeof to->handle);
	}
	c->next_region += n;
	return 0;
}

int regions_replace(kvs_client *c, const struct kvs_region *all, uint32_t n)
{
	struct region *old = c->regions;
	uint32_t count = c->region_count, next = c->next_region;
	c->regions = NULL;
	c->region_count = c->next_region = 0;
	int rc = regions_add(c, all, n);
	if (rc < 0) {
		free(c->regions);
		c->regions = old;
		c->region_count = count;
		c->next_region = next;
		return rc;
	}
	for (uint32_t i = 0; i < count; i++)
		file_put(c, old[i].file);
	free(old);
	c->registered = n;
	/* Numbers of regions that were dropped meanwhile stay unused. */
	if (next > c->next_region)
		c->next_region = next;
	return 0;
}

void regions_free(kvs_client *c)
{
	regions_cut(c, 0);
	free(c->regions);
	c->regions = NULL;
	c->next_region = 0;
}

/* ---- packets ---- */

/* Takes regions [from, end) as far as they have consecutive numbers and their descriptors fit a packet. Several regions may
 * name one descriptor. */
static void packet_fill(const kvs_client *c, struct region_packet *p, uint32_t from, uint32_t end, uint32_t base)
{
	int files[KVS_PACKET_MAX_FDS];
	p->regions = &c->regions[from];
	p->count = p->nfds = 0;
	for (uint32_t i = from; i < end && p->count < MAX_PACKET_REGIONS; i++) {
		const struct region *r = &c->regions[i];
		uint32_t at = r->kind != KVS_REGION_DEVICE ? 0 : p->nfds;
		if (i > from && r->number != r[-1].number + 1)
			break;
		while (at < p->nfds && files[at] != r->file)
			at++;
		if (r->file >= 0 && at == p->nfds) {
			if (base + at == KVS_PACKET_MAX_FDS)
				break;
			files[at] = r->file;
			p->fds[p->nfds++] = c->files[r->file].fd;
		}
		p->index[p->count++] = base + at;
	}
}

int regions_send(kvs_client *c, uint32_t from, uint32_t end)
{
	int rc = 0;
	while (from < end && rc == 0) {
		struct region_packet p;
		struct mpw w = {0};
		packet_fill(c, &p, from, end, 0);
		write_add_regions(&w, ++c->msg, &p);
		rc = message_send(c, MSG_ADD_REGIONS, &w, p.fds, p.nfds);
		c->regions_msg = c->msg;
		mpw_free(&w);
		from += p.count;
	}
	return rc;
}

int regions_stage(kvs_client *c, struct region_packet *p)
{
	packet_fill(c, p, 0, c->registered, BOARD_FDS);
	if (p->count == c->registered && p->count <= REGISTER_FDS && p->nfds <= REGISTER_FDS - WORK_FDS)
		return 0;
	packet_fill(c, p, c->registered, c->registered, BOARD_FDS);
	return regions_send(c, 0, c->registered);
}

/* ---- public ---- */

/* Whether this session has the regions so far, so that a change has to be sent. */
static bool session_has_regions(const kvs_client *c)
{
	return c->state == REGISTERING || session_usable(c);
}

int64_t kvs_regions_add(kvs_client *c, const struct kvs_region *regions, uint32_t n)
{
	CHECK(c);
	if (!regions || !n)
		return KVS_E_ARG;
	pthread_mutex_lock(&c->mu);
	int64_t rc = KVS_E_ARG;
	uint32_t before = c->region_count, first = c->next_region;
	if (c->role == KVS_SCHEDULER || !c->started)
		log_error(c, "regions are added to a worker that was started");
	else
		rc = regions_add(c, regions, n);
	/* Another session gets all regions. */
	if (rc == 0 && session_has_regions(c) && regions_send(c, before, c->region_count) < 0)
		session_break(c, strerror(errno));
	pthread_mutex_unlock(&c->mu);
	return rc < 0 ? rc : first;
}

int kvs_regions_wait(kvs_client *c, int timeout_ms)
{
	CHECK(c);
	struct timespec end = at_ms(kvs_now_ms() + (timeout_ms < 0 ? 0 : timeout_ms));
	pthread_mutex_lock(&c->mu);
	for (bool late = timeout_ms == 0; !late && session_connected(c) && c->regions_answered < c->regions_msg;)
		late = (timeout_ms < 0 ? pthread_cond_wait(&c->changed, &c->mu) : pthread_cond_timedwait(&c->changed, &c->mu, &end)) == ETIMEDOUT;
	int rc = session_connected(c) && c->regions_answered >= c->regions_msg;
	pthread_mutex_unlock(&c->mu);
	return rc;
}

void regions_answer(kvs_client *c, uint64_t msg)
{
	if (msg <= c->regions_answered || msg > c->regions_msg)
		return;
	c->regions_answered = msg;
	pthread_cond_broadcast(&c->changed);
}

int64_t kvs_regions_drop(kvs_client *c, const uint32_t *numbers, uint32_t n)
{
	CHECK(c);
	if (!numbers || !n || n > KVS_MAX_REGIONS)
		return KVS_E_ARG;
	uint8_t *list = malloc(4 * (size_t)n);
	if (!list)
		return KVS_E_SYS;
	int64_t rc = 0;
	pthread_mutex_lock(&c->mu);
	for (uint32_t i = 0; i < n && rc == 0; i++) {
		uint32_t at = c->registered;
		while (at < c->region_count && c->regions[at].number != numbers[i])
			at++;
		for (uint32_t j = 0; j < i; j++)
			if (numbers[j] == numbers[i])
				at = c->region_count;
		if (at == c->region_count) {
			log_error(c, "drop: %u is not the number of a region that was added", numbers[i]);
			rc = KVS_E_ARG;
		}
		for (int b = 0; b < 4; b++)
			list[4 * i + b] = (uint8_t)(numbers[i] >> 8 * b);
	}
	if (rc == 0 && session_has_regions(c)) {
		struct mpw w = {0};
		mpw_put_bin(&w, "regions", list, 4 * (size_t)n);
		rc = request_post(c, MSG_DROP_REGIONS, 1, &w);
		mpw_free(&w);
		if (rc == KVS_E_FULL || rc == KVS_E_DEGRADED) {
			session_break(c, "a region could not be dropped");
			rc = 0;
		}
	}
	for (uint32_t i = 0; i < n && rc >= 0; i++) {
		uint32_t at = c->registered;
		while (c->regions[at].number != numbers[i])
			at++;
		file_put(c, c->regions[at].file);
		memmove(&c->regions[at], &c->regions[at + 1], (--c->region_count - at) * sizeof *c->regions);
	}
	pthread_mutex_unlock(&c->mu);
	free(list);
	return rc;
}
