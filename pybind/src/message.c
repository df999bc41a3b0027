/* Messages on the socket (docs/protocol.md section 1): their bodies, and the packets that carry them. */
#include <errno.h>
#include <sys/socket.h>

#include "client.h"

/* ---- packets ---- */

union control {
	struct cmsghdr align;
	char buf[CMSG_SPACE(sizeof(int) * KVS_PACKET_MAX_FDS)];
};

int message_send(kvs_client *c, uint32_t type, const struct mpw *body, const int *fds, uint32_t nfds)
{
	uint8_t head[4] = {(uint8_t)type, (uint8_t)(type >> 8), (uint8_t)(type >> 16), (uint8_t)(type >> 24)};
	struct iovec iov[2] = {{head, sizeof head}, {body->buf, body->len}};
	union control control;
	struct msghdr msg = {.msg_iov = iov, .msg_iovlen = 2};
	if (body->bad || body->len + sizeof head > KVS_PACKET_MAX_BYTES) {
		errno = EMSGSIZE;
		return -1;
	}
	if (nfds) {
		memset(&control, 0, sizeof control);
		msg.msg_control = control.buf;
		msg.msg_controllen = CMSG_SPACE(sizeof(int) * nfds);
		struct cmsghdr *cm = CMSG_FIRSTHDR(&msg);
		cm->cmsg_level = SOL_SOCKET;
		cm->cmsg_type = SCM_RIGHTS;
		cm->cmsg_len = CMSG_LEN(sizeof(int) * nfds);
		memcpy(CMSG_DATA(cm), fds, sizeof(int) * nfds);
	}
	return sendmsg(c->sock, &msg, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 ? -1 : 0;
}

/* Closes descriptors that came with a packet: a sidecar has none to give. */
static void drop_fds(struct msghdr *msg)
{
	for (struct cmsghdr *cm = CMSG_FIRSTHDR(msg); cm; cm = CMSG_NXTHDR(msg, cm)) {
		if (cm->cmsg_level != SOL_SOCKET || cm->cmsg_type != SCM_RIGHTS)
			continue;
		size_t n = (cm->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < n; i++) {
			int fd;
			memcpy(&fd, CMSG_DATA(cm) + i * sizeof fd, sizeof fd);
			close(fd);
		}
	}
}

ssize_t message_receive(kvs_client *c, bool *truncated)
{
	union control control;
	struct iovec iov = {c->packet, KVS_PACKET_MAX_BYTES};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.buf, .msg_controllen = sizeof control.buf};
	ssize_t n = recvmsg(c->sock, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (n > 0)
		drop_fds(&msg);
	*truncated = n > 0 && (msg.msg_flags & MSG_TRUNC);
	return n;
}

/* ---- what is sent ---- */

void write_hello(const kvs_client *c, struct mpw *w)
{
	static const char *const rank_names[5] = {"dp", "pp", "tp", "pcp", "dcp"};
	const uint32_t version = KVS_PROTOCOL_MAJOR << 16 | KVS_PROTOCOL_MINOR;
	mpw_map(w, 10);
	mpw_put_uint(w, "id", c->hello_msg);
	mpw_put_uint(w, "min", version);
	mpw_put_uint(w, "max", version);
	mpw_put_str(w, "role", c->role == KVS_WORKER ? "worker" : "scheduler");
	mpw_put_bin(w, "boot", c->boot, 16);
	mpw_str(w, "engine");
	mpw_map(w, 3 + (c->engine_api[0] != 0) + (c->engine_role[0] != 0) + (c->engine_events[0] != 0) + (c->engine_replay[0] != 0));
	mpw_put_str(w, "name", c->engine_name);
	mpw_put_str(w, "version", c->engine_version);
	mpw_put_str(w, "id", c->engine_id);
	if (c->engine_api[0])
		mpw_put_str(w, "api", c->engine_api);
	if (c->engine_role[0])
		mpw_put_str(w, "role", c->engine_role);
	if (c->engine_events[0])
		mpw_put_str(w, "events", c->engine_events);
	if (c->engine_replay[0])
		mpw_put_str(w, "replay", c->engine_replay);
	mpw_str(w, "ranks");
	mpw_map(w, 5);
	for (int i = 0; i < 5; i++) {
		mpw_str(w, rank_names[i]);
		mpw_array(w, 2);
		mpw_uint(w, c->ranks[2 * i]);
		mpw_uint(w, c->ranks[2 * i + 1]);
	}
	mpw_put_uint(w, "pid", (uint64_t)getpid());
	mpw_str(w, "features");
	mpw_array(w, 0);
	mpw_put_str(w, "release", c->release);
}

static void write_regions(struct mpw *w, const struct region_packet *p)
{
	static const char *const kinds[] = {"", "memfd", "process", "device"};
	mpw_str(w, "regions");
	mpw_array(w, p->count);
	for (uint32_t i = 0; i < p->count; i++) {
		const struct region *r = &p->regions[i];
		bool process = r->kind == KVS_REGION_PROCESS, device = r->kind == KVS_REGION_DEVICE;
		mpw_map(w, 3 + process + device + (r->file >= 0) + (r->offset != 0));
		mpw_put_bin(w, "region", r->id, 16);
		mpw_put_str(w, "kind", kinds[r->kind]);
		mpw_put_uint(w, "bytes", r->bytes);
		if (process)
			mpw_put_uint(w, "addr", r->addr);
		if (device)
			mpw_put_bin(w, "handle", r->handle, sizeof r->handle);
		if (r->file >= 0)
			mpw_put_uint(w, "fd", p->index[i]);
		if (r->offset)
			mpw_put_uint(w, "offset", r->offset);
	}
}

void write_add_regions(struct mpw *w, uint64_t id, const struct region_packet *p)
{
	mpw_map(w, 3);
	mpw_put_uint(w, "id", id);
	mpw_put_uint(w, "first", p->regions[0].number);
	write_regions(w, p);
}

void write_register(const kvs_client *c, struct mpw *w, const struct region_packet *p)
{
	uint32_t staged = c->registered - p->count;
	mpw_map(w, 4 + (c->layout_bytes != 0) + (staged != 0));
	mpw_put_uint(w, "id", c->register_msg);
	mpw_put_bin(w, "session", c->session_id, 16);
	write_regions(w, p);
	if (c->layout_bytes) {
		mpw_str(w, "layout");
		mpw_raw(w, c->layout, c->layout_bytes);
	}
	if (staged)
		mpw_put_uint(w, "first", staged);
	mpw_str(w, "fds");
	mpw_map(w, 4);
	mpw_put_uint(w, "flags", 0);
	mpw_put_uint(w, "rings", 1);
	mpw_put_uint(w, "sq_eventfd", 2);
	mpw_put_uint(w, "cq_eventfd", 3);
}

/* ---- what is received ---- */

/* A key of a map, and where its value goes: the pointer that is set gives the type. `bytes` belongs to str and bin; raw takes any value. */
struct want {
	const char *key;
	uint64_t *num;
	bool *flag;
	const char **str;
	const uint8_t **bin;
	uint32_t *bytes;
	struct mpr *raw;
};

static bool read_value(struct mpr *r, const struct want *w)
{
	struct mpr start = *r;
	if (w->num)
		return mpr_uint(r, w->num);
	if (w->flag)
		return mpr_bool(r, w->flag);
	if (w->str)
		return mpr_str(r, w->str, w->bytes);
	if (w->bin)
		return mpr_bin(r, w->bin, w->bytes);
	if (!mpr_skip(r))
		return false;
	*w->raw = mpr_make(start.p, (size_t)(r->p - start.p));
	return true;
}

/* Unknown keys are skipped. */
static bool read_map(struct mpr r, const struct want *want, size_t wants)
{
	uint32_t n;
	if (!mpr_map(&r, &n))
		return false;
	while (n--) {
		const char *k;
		uint32_t kn;
		size_t i = 0;
		if (!mpr_str(&r, &k, &kn))
			return false;
		while (i < wants && !mp_key(k, kn, want[i].key))
			i++;
		if (!(i < wants ? read_value(&r, &want[i]) : mpr_skip(&r)))
			return false;
	}
	return true;
}

#define READ_MAP(r, want) read_map(r, want, sizeof(want) / sizeof *(want))

static bool read_features(struct mpr r, struct welcome *m)
{
	uint32_t n;
	if (!mpr_array(&r, &n))
		return false;
	while (n--) {
		const char *k;
		uint32_t kn;
		if (!mpr_str(&r, &k, &kn))
			return false;
		m->can_store |= mp_key(k, kn, "store");
		m->can_segments |= mp_key(k, kn, "segments");
	}
	return true;
}

bool read_welcome(const uint8_t *body, size_t bytes, struct welcome *m)
{
	uint32_t boot_bytes = 0;
	struct mpr limits = {0}, features = {0};
	const struct want want[] = {{.key = "id", .num = &m->id},
				    {.key = "version", .num = &m->version},
				    {.key = "boot", .bin = &m->boot, .bytes = &boot_bytes},
				    {.key = "node", .str = &m->node, .bytes = &m->node_bytes},
				    {.key = "endpoint", .str = &m->endpoint, .bytes = &m->endpoint_bytes},
				    {.key = "fenced", .flag = &m->fenced},
				    {.key = "limits", .raw = &limits},
				    {.key = "features", .raw = &features},
				    {.key = "deadline_ms", .num = &m->deadline_ms},
				    {.key = "match_timeout_ms", .num = &m->match_timeout_ms},
				    {.key = "grace_ms", .num = &m->grace_ms},
				    {.key = "release", .str = &m->release, .bytes = &m->release_bytes}};
	const struct want limit[] = {{.key = "leases", .num = &m->leases}, {.key = "copies", .num = &m->copies}};
	memset(m, 0, sizeof *m);
	return READ_MAP(mpr_make(body, bytes), want) && boot_bytes == 16 && (!limits.p || READ_MAP(limits, limit)) &&
	       (!features.p || read_features(features, m));
}

bool read_error(const uint8_t *body, size_t bytes, struct refusal *m)
{
	const struct want want[] = {{.key = "id", .num = &m->id},
				    {.key = "code", .str = &m->code, .bytes = &m->code_bytes},
				    {.key = "message", .str = &m->message, .bytes = &m->message_bytes},
				    {.key = "field", .str = &m->field, .bytes = &m->field_bytes},
				    {.key = "remedy", .str = &m->remedy, .bytes = &m->remedy_bytes},
				    {.key = "fatal", .flag = &m->fatal}};
	*m = (struct refusal){.code = "", .message = "", .field = "", .remedy = ""};
	return READ_MAP(mpr_make(body, bytes), want);
}

bool read_held(const uint8_t *body, size_t bytes, uint64_t *lease)
{
	const struct want want[] = {{.key = "lease", .num = lease}};
	*lease = 0;
	return READ_MAP(mpr_make(body, bytes), want);
}

bool read_id(const uint8_t *body, size_t bytes, uint64_t *id)
{
	const struct want want[] = {{.key = "id", .num = id}};
	*id = 0;
	return READ_MAP(mpr_make(body, bytes), want);
}

bool read_admitted(const uint8_t *body, size_t bytes, struct admitted *m)
{
	const char *state = "";
	uint32_t state_bytes = 0;
	const struct want want[] = {{.key = "id", .num = &m->id},
				    {.key = "state", .str = &state, .bytes = &state_bytes},
				    {.key = "tokens", .num = &m->tokens},
				    {.key = "message", .str = &m->message, .bytes = &m->message_bytes}};
	*m = (struct admitted){.message = ""};
	if (!READ_MAP(mpr_make(body, bytes), want))
		return false;
	m->state = mp_key(state, state_bytes, "admitted")  ? KVS_ADMISSION_ADMITTED
		   : mp_key(state, state_bytes, "refused") ? KVS_ADMISSION_REFUSED
							   : KVS_ADMISSION_GONE;
	return true;
}
