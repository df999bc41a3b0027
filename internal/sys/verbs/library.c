#define _GNU_SOURCE
#include "library.h"
#include "abi.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

/* Every entry point that is called by name; the rest are in a context's table. */
#define ENTRY_POINTS(X)                                                                                \
	X(get_device_list, void **, (int *))                                                           \
	X(free_device_list, void, (void **))                                                           \
	X(get_device_name, const char *, (void *))                                                     \
	X(open_device, struct kvi_context *, (void *))                                                 \
	X(close_device, int, (struct kvi_context *))                                                   \
	X(query_device, int, (struct kvi_context *, struct kvi_device_attr *))                         \
	X(query_port, int, (struct kvi_context *, uint8_t, struct kvi_port_attr *))                    \
	X(query_gid, int, (struct kvi_context *, uint8_t, int, union kvi_gid *))                       \
	X(get_async_event, int, (struct kvi_context *, struct kvi_async_event *))                      \
	X(ack_async_event, void, (struct kvi_async_event *))                                           \
	X(alloc_pd, void *, (struct kvi_context *))                                                    \
	X(dealloc_pd, int, (void *))                                                                   \
	X(reg_mr, struct kvi_mr *, (void *, void *, size_t, int))                                      \
	X(dereg_mr, int, (struct kvi_mr *))                                                            \
	X(create_comp_channel, struct kvi_comp_channel *, (struct kvi_context *))                      \
	X(destroy_comp_channel, int, (struct kvi_comp_channel *))                                      \
	X(create_cq, struct kvi_cq *, (struct kvi_context *, int, void *, struct kvi_comp_channel *, int)) \
	X(destroy_cq, int, (struct kvi_cq *))                                                          \
	X(get_cq_event, int, (struct kvi_comp_channel *, struct kvi_cq **, void **))                   \
	X(ack_cq_events, void, (struct kvi_cq *, unsigned))                                            \
	X(create_qp, struct kvi_qp *, (void *, struct kvi_qp_init_attr *))                             \
	X(modify_qp, int, (struct kvi_qp *, struct kvi_qp_attr *, int))                                \
	X(destroy_qp, int, (struct kvi_qp *))

static struct {
#define FIELD(name, result, args) result(*name) args;
	ENTRY_POINTS(FIELD)
#undef FIELD
	/* Absent before rdma-core 34. */
	struct kvi_mr *(*reg_dmabuf_mr)(void *, uint64_t, size_t, uint64_t, int, int);
} lib;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static char missing[256];

static void open_once(void)
{
	/* After a device was unplugged, destroying what belonged to it succeeds: the kernel has taken it down already. Without this the
	   library answers EIO for ever, and no caller learns that the memory is free. It looks once, before its first list. */
	setenv("RDMAV_ALLOW_DISASSOC_DESTROY", "1", 0);
	void *h = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!h) {
		const char *e = dlerror();
		strncpy(missing, e ? e : "libibverbs.so.1 cannot be opened", sizeof missing - 1);
		return;
	}
#define LOAD(name, result, args)                                                                       \
	if (!(*(void **)&lib.name = dlsym(h, "ibv_" #name))) {                                         \
		strncpy(missing, "libibverbs.so.1 has no ibv_" #name, sizeof missing - 1);             \
		return;                                                                                \
	}
	ENTRY_POINTS(LOAD)
#undef LOAD
	*(void **)&lib.reg_dmabuf_mr = dlsym(h, "ibv_reg_dmabuf_mr");
}

int kvv_open_library(const char **why)
{
	pthread_once(&once, open_once);
	*why = missing;
	return missing[0] ? ENOSYS : 0;
}

/* failed is the errno that a failed call left, or a general one. */
static int failed(void)
{
	return errno ? errno : EIO;
}

static int nonblocking(int fd)
{
	int flags = fcntl(fd, F_GETFL);
	return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? errno : 0;
}

struct kvv_device {
	struct kvi_context *context;
};

int kvv_device_open(const char *name, struct kvv_device **out, int *async_fd)
{
	int n = 0, err = ENODEV;
	errno = 0;
	void **list = lib.get_device_list(&n);
	if (!list)
		return failed();
	struct kvv_device *d = calloc(1, sizeof *d);
	for (int i = 0; d && i < n; i++)
		if (strcmp(lib.get_device_name(list[i]), name) == 0) {
			errno = 0;
			d->context = lib.open_device(list[i]);
			err = d->context ? 0 : failed();
			break;
		}
	lib.free_device_list(list);
	if (!d)
		return ENOMEM;
	if (!err)
		err = nonblocking(d->context->async_fd);
	if (err) {
		kvv_device_close(d);
		return err;
	}
	*out = d;
	*async_fd = d->context->async_fd;
	return 0;
}

int kvv_device_close(struct kvv_device *d)
{
	errno = 0;
	if (d->context && lib.close_device(d->context))
		return failed();
	free(d);
	return 0;
}

int kvv_device_limits(struct kvv_device *d, uint8_t port, struct kvv_limits *out)
{
	struct kvi_device_attr a;
	struct kvi_port_attr p;
	memset(&a, 0, sizeof a);
	memset(&p, 0, sizeof p);
	int err = lib.query_device(d->context, &a);
	if (!err)
		err = lib.query_port(d->context, port, &p);
	if (err)
		return err < 0 ? failed() : err;
	*out = (struct kvv_limits){.max_mr_size = a.max_mr_size, .max_msg = p.max_msg_sz, .max_qp_wr = a.max_qp_wr, .max_cqe = a.max_cqe,
		.max_qp = a.max_qp, .max_mr = a.max_mr,
		.max_reads = a.max_qp_rd_atom < a.max_qp_init_rd_atom ? a.max_qp_rd_atom : a.max_qp_init_rd_atom, .port_state = p.state, .active_mtu = p.active_mtu, .lid = p.lid,
		.link_layer = p.link_layer};
	return 0;
}

int kvv_device_gid(struct kvv_device *d, uint8_t port, int index, uint8_t gid[16])
{
	union kvi_gid g;
	errno = 0;
	if (lib.query_gid(d->context, port, index, &g))
		return failed();
	memcpy(gid, g.raw, sizeof g.raw);
	return 0;
}

int kvv_device_event(struct kvv_device *d, int *type, uint32_t *port_or_qp)
{
	struct kvi_async_event e;
	errno = 0;
	if (lib.get_async_event(d->context, &e))
		return failed();
	*type = e.event_type;
	switch (e.event_type) {
	case KVI_EVENT_QP_FATAL:
	case KVI_EVENT_QP_REQ_ERR:
	case KVI_EVENT_QP_ACCESS_ERR:
		*port_or_qp = e.element.qp->qp_num;
		break;
	case KVI_EVENT_PORT_ACTIVE:
	case KVI_EVENT_PORT_ERR:
	case KVI_EVENT_GID_CHANGE:
	case KVI_EVENT_LID_CHANGE:
		*port_or_qp = (uint32_t)e.element.port_num;
		break;
	default:
		*port_or_qp = 0;
	}
	lib.ack_async_event(&e);
	return 0;
}

struct kvv_domain {
	void *pd;
};

int kvv_domain_alloc(struct kvv_device *d, struct kvv_domain **out)
{
	struct kvv_domain *p = calloc(1, sizeof *p);
	if (!p)
		return ENOMEM;
	errno = 0;
	p->pd = lib.alloc_pd(d->context);
	if (!p->pd) {
		int err = failed();
		free(p);
		return err;
	}
	*out = p;
	return 0;
}

int kvv_domain_free(struct kvv_domain *p)
{
	errno = 0;
	int err = lib.dealloc_pd(p->pd);
	if (err)
		return err < 0 ? failed() : err; /* EBUSY: something of it is still there, and keeps it */
	free(p);
	return 0;
}

static int registered(struct kvi_mr *m, void **mr, uint32_t *lkey, uint32_t *rkey)
{
	if (!m)
		return failed();
	*mr = m;
	*lkey = m->lkey;
	*rkey = m->rkey;
	return 0;
}

static int access_of(int remote)
{
	return remote ? KVI_ACCESS_LOCAL_WRITE | KVI_ACCESS_REMOTE_WRITE : 0;
}

int kvv_register(struct kvv_domain *p, void *addr, size_t len, int remote, void **mr, uint32_t *lkey, uint32_t *rkey)
{
	errno = 0;
	return registered(lib.reg_mr(p->pd, addr, len, access_of(remote)), mr, lkey, rkey);
}

int kvv_register_peer(struct kvv_domain *p, uint64_t addr, size_t len, int remote, void **mr, uint32_t *lkey, uint32_t *rkey)
{
	return kvv_register(p, (void *)(uintptr_t)addr, len, remote, mr, lkey, rkey);
}

int kvv_register_dmabuf(struct kvv_domain *p, uint64_t offset, size_t len, uint64_t iova, int fd, int remote, void **mr, uint32_t *lkey,
			uint32_t *rkey)
{
	if (!lib.reg_dmabuf_mr)
		return ENOSYS;
	errno = 0;
	return registered(lib.reg_dmabuf_mr(p->pd, offset, len, iova, fd, access_of(remote)), mr, lkey, rkey);
}

int kvv_deregister(void *mr)
{
	return lib.dereg_mr(mr);
}

int kvv_on_demand(struct kvv_domain *p, void *addr, size_t len)
{
	errno = 0;
	struct kvi_mr *m = lib.reg_mr(p->pd, addr, len, KVI_ACCESS_LOCAL_WRITE | KVI_ACCESS_ON_DEMAND);
	return m ? lib.dereg_mr(m) : failed();
}

struct kvv_cq {
	struct kvi_comp_channel *channel;
	struct kvi_cq *cq;
	unsigned events; /* not acknowledged yet */
};

int kvv_cq_create(struct kvv_device *d, int depth, struct kvv_cq **out, int *fd)
{
	struct kvv_cq *c = calloc(1, sizeof *c);
	if (!c)
		return ENOMEM;
	errno = 0;
	c->channel = lib.create_comp_channel(d->context);
	int err = c->channel ? nonblocking(c->channel->fd) : failed();
	if (!err) {
		errno = 0;
		c->cq = lib.create_cq(d->context, depth, NULL, c->channel, 0);
		err = c->cq ? 0 : failed();
	}
	if (!err)
		err = c->cq->context->ops.req_notify_cq(c->cq, 0);
	if (err) {
		kvv_cq_destroy(c);
		return err;
	}
	*out = c;
	*fd = c->channel->fd;
	return 0;
}

int kvv_cq_destroy(struct kvv_cq *c)
{
	int err = 0;
	if (c->cq) {
		if (c->events)
			lib.ack_cq_events(c->cq, c->events);
		c->events = 0;
		err = lib.destroy_cq(c->cq);
		if (err)
			return err;
	}
	if (c->channel)
		err = lib.destroy_comp_channel(c->channel);
	free(c);
	return err;
}

int kvv_cq_poll(struct kvv_cq *c, struct kvv_done *out, int max, int *n)
{
	enum { BATCH = 32 };
	struct kvi_wc wc[BATCH];
	int armed = 0;
	*n = 0;
	while (*n < max) {
		int want = max - *n < BATCH ? max - *n : BATCH;
		int got = c->cq->context->ops.poll_cq(c->cq, want, wc);
		if (got < 0)
			return EIO;
		for (int i = 0; i < got; i++)
			out[*n + i] = (struct kvv_done){.id = wc[i].wr_id, .qp = wc[i].qp_num, .imm = ntohl(wc[i].imm_data), .status = wc[i].status,
				.opcode = wc[i].opcode};
		*n += got;
		if (*n > 0) {
			if (got < want)
				return 0;
		} else if (armed) {
			return 0;
		} else {
			int err = c->cq->context->ops.req_notify_cq(c->cq, 0);
			if (err)
				return err;
			armed = 1;
		}
	}
	return 0;
}

int kvv_cq_event(struct kvv_cq *c)
{
	enum { ACK_EVERY = 64 }; /* acknowledging takes a mutex */
	struct kvi_cq *cq;
	void *ctx;
	errno = 0;
	if (lib.get_cq_event(c->channel, &cq, &ctx))
		return failed();
	if (++c->events == ACK_EVERY) {
		lib.ack_cq_events(c->cq, c->events);
		c->events = 0;
	}
	return 0;
}

struct kvv_qp {
	struct kvi_qp *qp;
};

int kvv_qp_create(struct kvv_domain *p, struct kvv_cq *cq, int sends, int receives, struct kvv_qp **out, uint32_t *num, int *max_inline)
{
	struct kvv_qp *q = calloc(1, sizeof *q);
	if (!q)
		return ENOMEM;
	struct kvi_qp_init_attr a = {.send_cq = cq->cq, .recv_cq = cq->cq, .qp_type = KVI_QPT_RC,
		.cap = {.max_send_wr = (uint32_t)sends, .max_recv_wr = (uint32_t)receives, .max_send_sge = 1, .max_recv_sge = 1,
			.max_inline_data = 64}};
	errno = 0;
	q->qp = lib.create_qp(p->pd, &a);
	if (!q->qp) { /* a device may have no inline data, and no limit of it can be queried */
		a.cap.max_inline_data = 0;
		errno = 0;
		q->qp = lib.create_qp(p->pd, &a);
	}
	if (!q->qp) {
		int err = failed();
		free(q);
		return err;
	}
	*out = q;
	*num = q->qp->qp_num;
	*max_inline = (int)a.cap.max_inline_data;
	return 0;
}

int kvv_qp_destroy(struct kvv_qp *q)
{
	int err = lib.destroy_qp(q->qp);
	if (!err)
		free(q);
	return err;
}

static int modify(struct kvv_qp *q, struct kvi_qp_attr *a, int mask)
{
	errno = 0;
	int err = lib.modify_qp(q->qp, a, mask | KVI_QP_STATE);
	return err < 0 ? failed() : err;
}

int kvv_qp_init(struct kvv_qp *q, uint8_t port)
{
	struct kvi_qp_attr a = {.qp_state = KVI_QPS_INIT, .port_num = port, .qp_access_flags = KVI_ACCESS_REMOTE_WRITE};
	return modify(q, &a, KVI_QP_PKEY_INDEX | KVI_QP_PORT | KVI_QP_ACCESS_FLAGS);
}

int kvv_qp_rtr(struct kvv_qp *q, const struct kvv_path *p)
{
	struct kvi_qp_attr a = {.qp_state = KVI_QPS_RTR, .path_mtu = p->mtu, .dest_qp_num = p->qp, .rq_psn = p->psn, .max_dest_rd_atomic = p->reads,
		.min_rnr_timer = 12,
		.ah_attr = {.dlid = p->lid, .sl = p->service_level, .is_global = p->is_global, .port_num = p->port,
			    .grh = {.sgid_index = p->gid_index, .hop_limit = p->hop_limit, .traffic_class = p->traffic_class}}};
	memcpy(a.ah_attr.grh.dgid.raw, p->gid, sizeof p->gid);
	return modify(q, &a,
		      KVI_QP_AV | KVI_QP_PATH_MTU | KVI_QP_DEST_QPN | KVI_QP_RQ_PSN | KVI_QP_MAX_DEST_RD_ATOMIC | KVI_QP_MIN_RNR_TIMER);
}

int kvv_qp_rts(struct kvv_qp *q, uint32_t psn, uint8_t timeout, uint8_t retries, uint8_t reads)
{
	struct kvi_qp_attr a = {.qp_state = KVI_QPS_RTS, .timeout = timeout, .retry_cnt = retries, .rnr_retry = retries, .sq_psn = psn,
		.max_rd_atomic = reads};
	return modify(q, &a, KVI_QP_TIMEOUT | KVI_QP_RETRY_CNT | KVI_QP_RNR_RETRY | KVI_QP_SQ_PSN | KVI_QP_MAX_QP_RD_ATOMIC);
}

int kvv_qp_error(struct kvv_qp *q)
{
	struct kvi_qp_attr a = {.qp_state = KVI_QPS_ERR};
	return modify(q, &a, 0);
}

int kvv_qp_reset(struct kvv_qp *q)
{
	struct kvi_qp_attr a = {.qp_state = KVI_QPS_RESET};
	return modify(q, &a, 0);
}

int kvv_qp_send(struct kvv_qp *q, const struct kvv_work *work, int n, int *posted)
{
	enum { BATCH = 64 };
	struct kvi_send_wr wr[BATCH], *bad;
	struct kvi_sge sge[BATCH];
	for (*posted = 0; *posted < n;) {
		int k = n - *posted < BATCH ? n - *posted : BATCH;
		for (int i = 0; i < k; i++) {
			const struct kvv_work *w = &work[*posted + i];
			sge[i] = (struct kvi_sge){.addr = w->local_addr, .length = w->len, .lkey = w->local_key};
			wr[i] = (struct kvi_send_wr){.wr_id = w->id, .next = i + 1 < k ? &wr[i + 1] : NULL, .sg_list = &sge[i], .num_sge = w->len > 0,
				.opcode = w->with_imm ? KVI_WR_RDMA_WRITE_WITH_IMM : KVI_WR_RDMA_WRITE,
				.send_flags = (w->signaled ? KVI_SEND_SIGNALED : 0u) | (w->inlined ? KVI_SEND_INLINE : 0u),
				.imm_data = htonl(w->imm), .remote_addr = w->remote_addr, .rkey = w->remote_key};
		}
		bad = NULL;
		int err = q->qp->context->ops.post_send(q->qp, wr, &bad);
		if (err) {
			*posted += bad ? (int)(bad - wr) : 0;
			return err < 0 ? -err : err;
		}
		*posted += k;
	}
	return 0;
}

int kvv_qp_receive(struct kvv_qp *q, const uint64_t *ids, int n)
{
	for (int i = 0; i < n; i++) {
		struct kvi_recv_wr wr = {.wr_id = ids[i]}, *bad;
		int err = q->qp->context->ops.post_recv(q->qp, &wr, &bad);
		if (err)
			return err < 0 ? -err : err;
	}
	return 0;
}
