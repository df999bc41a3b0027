/* Trampolines into libibverbs, opened at run time. Every call returns 0 or an errno. Nothing here keeps a pointer of its
 * caller's after it has returned, but for the memory that kvv_register covers.
 */
#ifndef KVSPRAY_VERBS_LIBRARY_H
#define KVSPRAY_VERBS_LIBRARY_H

#include <stddef.h>
#include <stdint.h>

struct kvv_device;
struct kvv_domain;
struct kvv_cq;
struct kvv_qp;

/* kvv_open_library opens libibverbs.so.1, once. Otherwise *why is what is missing. */
int kvv_open_library(const char **why);

struct kvv_limits {
	uint64_t max_mr_size;
	uint32_t max_msg;
	int32_t max_qp_wr, max_cqe, max_qp, max_mr;
	int32_t max_reads; /* that a queue pair may have outstanding, as either end */
	int32_t port_state, active_mtu;
	uint16_t lid;
	uint8_t link_layer;
};

int kvv_device_open(const char *name, struct kvv_device **dev, int *async_fd);
int kvv_device_close(struct kvv_device *dev);
int kvv_device_limits(struct kvv_device *dev, uint8_t port, struct kvv_limits *out);
int kvv_device_gid(struct kvv_device *dev, uint8_t port, int index, uint8_t gid[16]);
/* kvv_device_event takes one event without blocking: EAGAIN where there is none. */
int kvv_device_event(struct kvv_device *dev, int *type, uint32_t *port_or_qp);

/* kvv_domain_free fails with EBUSY while something is in the domain. */
int kvv_domain_alloc(struct kvv_device *dev, struct kvv_domain **domain);
int kvv_domain_free(struct kvv_domain *domain);

int kvv_register(struct kvv_domain *domain, void *addr, size_t len, int remote, void **mr, uint32_t *lkey, uint32_t *rkey);
/* kvv_register_peer is kvv_register for an address that no load of this process reaches. */
int kvv_register_peer(struct kvv_domain *domain, uint64_t addr, size_t len, int remote, void **mr, uint32_t *lkey, uint32_t *rkey);
int kvv_register_dmabuf(struct kvv_domain *domain, uint64_t offset, size_t len, uint64_t iova, int fd, int remote, void **mr, uint32_t *lkey,
			uint32_t *rkey);
int kvv_deregister(void *mr);
/* kvv_on_demand registers a range without pinning it, and undoes that: 0 where the device can. */
int kvv_on_demand(struct kvv_domain *domain, void *addr, size_t len);

/* Flat copies of what Go passes and gets; the layouts equal those of verbs.Work and verbs.Completion's trampolines. */
struct kvv_work {
	uint64_t id, local_addr, remote_addr;
	uint32_t local_key, remote_key, len, imm;
	uint8_t with_imm, signaled, inlined, pad[5];
};
struct kvv_done {
	uint64_t id;
	uint32_t qp, imm;
	int32_t status, opcode;
};

int kvv_cq_create(struct kvv_device *dev, int depth, struct kvv_cq **cq, int *fd);
int kvv_cq_destroy(struct kvv_cq *cq);
/* kvv_cq_poll takes completions; where there are none it asks for an event and looks once more. */
int kvv_cq_poll(struct kvv_cq *cq, struct kvv_done *out, int max, int *n);
/* kvv_cq_event takes one event of the channel without blocking: EAGAIN where there is none. */
int kvv_cq_event(struct kvv_cq *cq);

int kvv_qp_create(struct kvv_domain *domain, struct kvv_cq *cq, int sends, int receives, struct kvv_qp **qp, uint32_t *num, int *max_inline);
int kvv_qp_destroy(struct kvv_qp *qp);
int kvv_qp_init(struct kvv_qp *qp, uint8_t port);

struct kvv_path {
	uint8_t gid[16];
	uint32_t qp, psn;
	uint16_t lid;
	uint8_t port, gid_index, mtu, traffic_class, service_level, is_global, hop_limit, reads;
};
int kvv_qp_rtr(struct kvv_qp *qp, const struct kvv_path *path);
int kvv_qp_rts(struct kvv_qp *qp, uint32_t psn, uint8_t timeout, uint8_t retries, uint8_t reads);
int kvv_qp_error(struct kvv_qp *qp);
int kvv_qp_reset(struct kvv_qp *qp);
/* kvv_qp_send posts all; *posted is the number that were taken where it fails. */
int kvv_qp_send(struct kvv_qp *qp, const struct kvv_work *work, int n, int *posted);
int kvv_qp_receive(struct kvv_qp *qp, const uint64_t *ids, int n);

#endif
