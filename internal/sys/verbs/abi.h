/* The part of libibverbs' binary interface that kvspray uses, restated: no RDMA header and no RDMA library is needed to build
 * or to start. The library promises this interface to every program linked against libibverbs.so.1. test/rdma/abi.sh compares
 * each size and offset below with the header of rdma-core.
 */
#ifndef KVSPRAY_VERBS_ABI_H
#define KVSPRAY_VERBS_ABI_H

#include <pthread.h>
#include <stdint.h>

struct kvi_cq;
struct kvi_qp;
struct kvi_wc;
struct kvi_send_wr;
struct kvi_recv_wr;

/* Entries called nn only hold their place. */
struct kvi_context_ops {
	void *n00[11];
	int (*poll_cq)(struct kvi_cq *, int, struct kvi_wc *);
	int (*req_notify_cq)(struct kvi_cq *, int solicited_only);
	void *n13[12];
	int (*post_send)(struct kvi_qp *, struct kvi_send_wr *, struct kvi_send_wr **);
	int (*post_recv)(struct kvi_qp *, struct kvi_recv_wr *, struct kvi_recv_wr **);
	void *n27[5];
};

struct kvi_context {
	void *device;
	struct kvi_context_ops ops;
	int cmd_fd;
	int async_fd;
	int num_comp_vectors;
	pthread_mutex_t mutex;
	void *abi_compat;
};

struct kvi_comp_channel {
	struct kvi_context *context;
	int fd;
	int refcnt;
};

struct kvi_cq {
	struct kvi_context *context;
	struct kvi_comp_channel *channel;
	void *cq_context;
	uint32_t handle;
	int cqe;
	pthread_mutex_t mutex;
	pthread_cond_t cond;
	uint32_t comp_events_completed;
	uint32_t async_events_completed;
};

struct kvi_qp {
	struct kvi_context *context;
	void *qp_context;
	void *pd;
	struct kvi_cq *send_cq;
	struct kvi_cq *recv_cq;
	void *srq;
	uint32_t handle;
	uint32_t qp_num;
	int state;
	int qp_type;
	pthread_mutex_t mutex;
	pthread_cond_t cond;
	uint32_t events_completed;
};

struct kvi_mr {
	struct kvi_context *context;
	void *pd;
	void *addr;
	size_t length;
	uint32_t handle;
	uint32_t lkey;
	uint32_t rkey;
};

struct kvi_device_attr {
	char fw_ver[64];
	uint64_t node_guid;
	uint64_t sys_image_guid;
	uint64_t max_mr_size;
	uint64_t page_size_cap;
	uint32_t vendor_id;
	uint32_t vendor_part_id;
	uint32_t hw_ver;
	int max_qp;
	int max_qp_wr;
	unsigned device_cap_flags;
	int max_sge;
	int max_sge_rd;
	int max_cq;
	int max_cqe;
	int max_mr;
	int max_pd;
	int max_qp_rd_atom;
	int max_ee_rd_atom;
	int max_res_rd_atom;
	int max_qp_init_rd_atom;
	int rest[16];
	uint16_t max_pkeys;
	uint8_t local_ca_ack_delay;
	uint8_t phys_port_cnt;
};

struct kvi_port_attr {
	int state;
	int max_mtu;
	int active_mtu;
	int gid_tbl_len;
	uint32_t port_cap_flags;
	uint32_t max_msg_sz;
	uint32_t bad_pkey_cntr;
	uint32_t qkey_viol_cntr;
	uint16_t pkey_tbl_len;
	uint16_t lid;
	uint16_t sm_lid;
	uint8_t lmc;
	uint8_t max_vl_num;
	uint8_t sm_sl;
	uint8_t subnet_timeout;
	uint8_t init_type_reply;
	uint8_t active_width;
	uint8_t active_speed;
	uint8_t phys_state;
	uint8_t link_layer;
	uint8_t flags;
	uint16_t port_cap_flags2;
	uint32_t newer; /* active_speed_ex; older libraries end before it */
};

union kvi_gid {
	uint8_t raw[16];
	uint64_t word[2];
};

struct kvi_global_route {
	union kvi_gid dgid;
	uint32_t flow_label;
	uint8_t sgid_index;
	uint8_t hop_limit;
	uint8_t traffic_class;
};

struct kvi_ah_attr {
	struct kvi_global_route grh;
	uint16_t dlid;
	uint8_t sl;
	uint8_t src_path_bits;
	uint8_t static_rate;
	uint8_t is_global;
	uint8_t port_num;
};

struct kvi_qp_cap {
	uint32_t max_send_wr;
	uint32_t max_recv_wr;
	uint32_t max_send_sge;
	uint32_t max_recv_sge;
	uint32_t max_inline_data;
};

struct kvi_qp_init_attr {
	void *qp_context;
	struct kvi_cq *send_cq;
	struct kvi_cq *recv_cq;
	void *srq;
	struct kvi_qp_cap cap;
	int qp_type;
	int sq_sig_all;
};

struct kvi_qp_attr {
	int qp_state;
	int cur_qp_state;
	int path_mtu;
	int path_mig_state;
	uint32_t qkey;
	uint32_t rq_psn;
	uint32_t sq_psn;
	uint32_t dest_qp_num;
	unsigned qp_access_flags;
	struct kvi_qp_cap cap;
	struct kvi_ah_attr ah_attr;
	struct kvi_ah_attr alt_ah_attr;
	uint16_t pkey_index;
	uint16_t alt_pkey_index;
	uint8_t en_sqd_async_notify;
	uint8_t sq_draining;
	uint8_t max_rd_atomic;
	uint8_t max_dest_rd_atomic;
	uint8_t min_rnr_timer;
	uint8_t port_num;
	uint8_t timeout;
	uint8_t retry_cnt;
	uint8_t rnr_retry;
	uint8_t alt_port_num;
	uint8_t alt_timeout;
	uint32_t rate_limit;
};

struct kvi_sge {
	uint64_t addr;
	uint32_t length;
	uint32_t lkey;
};

struct kvi_send_wr {
	uint64_t wr_id;
	struct kvi_send_wr *next;
	struct kvi_sge *sg_list;
	int num_sge;
	int opcode;
	unsigned send_flags;
	uint32_t imm_data; /* big endian */
	uint64_t remote_addr;
	uint32_t rkey;
	uint64_t rest[9];
};

struct kvi_recv_wr {
	uint64_t wr_id;
	struct kvi_recv_wr *next;
	struct kvi_sge *sg_list;
	int num_sge;
};

struct kvi_wc {
	uint64_t wr_id;
	int status;
	int opcode;
	uint32_t vendor_err;
	uint32_t byte_len;
	uint32_t imm_data; /* big endian */
	uint32_t qp_num;
	uint32_t src_qp;
	unsigned wc_flags;
	uint16_t pkey_index;
	uint16_t slid;
	uint8_t sl;
	uint8_t dlid_path_bits;
};

struct kvi_async_event {
	union {
		struct kvi_cq *cq;
		struct kvi_qp *qp;
		int port_num;
		void *any;
	} element;
	int event_type;
};

/* Values of rdma-core's enumerations. */
enum {
	KVI_PORT_ACTIVE = 4,
	KVI_LINK_ETHERNET = 2,
	KVI_ACCESS_LOCAL_WRITE = 1,
	KVI_ACCESS_REMOTE_WRITE = 2,
	KVI_ACCESS_ON_DEMAND = 1 << 6,
	KVI_QPT_RC = 2,
	KVI_QPS_RESET = 0,
	KVI_QPS_INIT = 1,
	KVI_QPS_RTR = 2,
	KVI_QPS_RTS = 3,
	KVI_QPS_ERR = 6,
	KVI_QP_STATE = 1 << 0,
	KVI_QP_ACCESS_FLAGS = 1 << 3,
	KVI_QP_PKEY_INDEX = 1 << 4,
	KVI_QP_PORT = 1 << 5,
	KVI_QP_AV = 1 << 7,
	KVI_QP_PATH_MTU = 1 << 8,
	KVI_QP_TIMEOUT = 1 << 9,
	KVI_QP_RETRY_CNT = 1 << 10,
	KVI_QP_RNR_RETRY = 1 << 11,
	KVI_QP_RQ_PSN = 1 << 12,
	KVI_QP_MAX_QP_RD_ATOMIC = 1 << 13,
	KVI_QP_MIN_RNR_TIMER = 1 << 15,
	KVI_QP_SQ_PSN = 1 << 16,
	KVI_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
	KVI_QP_DEST_QPN = 1 << 20,
	KVI_WR_RDMA_WRITE = 0,
	KVI_WR_RDMA_WRITE_WITH_IMM = 1,
	KVI_SEND_SIGNALED = 1 << 1,
	KVI_SEND_INLINE = 1 << 3,
	KVI_WC_SUCCESS = 0,
	KVI_WC_LOC_PROT_ERR = 4,
	KVI_WC_WR_FLUSH_ERR = 5,
	KVI_WC_REM_ACCESS_ERR = 10,
	KVI_WC_RETRY_EXC_ERR = 12,
	KVI_WC_RNR_RETRY_EXC_ERR = 13,
	KVI_WC_RECV_RDMA_WITH_IMM = 129,
	KVI_EVENT_QP_FATAL = 1,
	KVI_EVENT_QP_ACCESS_ERR = 3,
	KVI_EVENT_DEVICE_FATAL = 8,
	KVI_EVENT_PORT_ACTIVE = 9,
	KVI_EVENT_PORT_ERR = 10,
	KVI_EVENT_LID_CHANGE = 11,
	KVI_EVENT_CQ_ERR = 0,
	KVI_EVENT_QP_REQ_ERR = 2,
	KVI_EVENT_GID_CHANGE = 18,
};

#endif
