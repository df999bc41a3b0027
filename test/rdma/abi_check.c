#include <infiniband/verbs.h>
#include <stddef.h>

#include "abi.h"

#define AT(theirs, ours, field)                                                                                                  \
	_Static_assert(offsetof(struct theirs, field) == offsetof(struct ours, field), #theirs "." #field " is elsewhere");          \
	_Static_assert(sizeof(((struct theirs *)0)->field) == sizeof(((struct ours *)0)->field), #theirs "." #field " has another size")
#define SIZE(theirs, ours) _Static_assert(sizeof(struct theirs) == sizeof(struct ours), #theirs " has another size")
#define VALUE(name) _Static_assert((int)IBV_##name == (int)KVI_##name, "IBV_" #name " has another value")

SIZE(ibv_context_ops, kvi_context_ops);
AT(ibv_context_ops, kvi_context_ops, poll_cq);
AT(ibv_context_ops, kvi_context_ops, req_notify_cq);
AT(ibv_context_ops, kvi_context_ops, post_send);
AT(ibv_context_ops, kvi_context_ops, post_recv);
SIZE(ibv_context, kvi_context);
AT(ibv_context, kvi_context, ops);
AT(ibv_context, kvi_context, async_fd);
AT(ibv_comp_channel, kvi_comp_channel, fd);
SIZE(ibv_cq, kvi_cq);
AT(ibv_cq, kvi_cq, context);
SIZE(ibv_qp, kvi_qp);
AT(ibv_qp, kvi_qp, context);
AT(ibv_qp, kvi_qp, qp_num);
SIZE(ibv_mr, kvi_mr);
AT(ibv_mr, kvi_mr, lkey);
AT(ibv_mr, kvi_mr, rkey);
SIZE(ibv_device_attr, kvi_device_attr);
AT(ibv_device_attr, kvi_device_attr, max_mr_size);
AT(ibv_device_attr, kvi_device_attr, max_qp);
AT(ibv_device_attr, kvi_device_attr, max_qp_wr);
AT(ibv_device_attr, kvi_device_attr, max_cqe);
AT(ibv_device_attr, kvi_device_attr, max_mr);
AT(ibv_device_attr, kvi_device_attr, max_qp_rd_atom);
AT(ibv_device_attr, kvi_device_attr, max_qp_init_rd_atom);
AT(ibv_device_attr, kvi_device_attr, phys_port_cnt);
AT(ibv_port_attr, kvi_port_attr, state);
AT(ibv_port_attr, kvi_port_attr, active_mtu);
AT(ibv_port_attr, kvi_port_attr, max_msg_sz);
AT(ibv_port_attr, kvi_port_attr, lid);
AT(ibv_port_attr, kvi_port_attr, link_layer);
_Static_assert(sizeof(struct ibv_port_attr) <= sizeof(struct kvi_port_attr), "ibv_port_attr has grown");
SIZE(ibv_global_route, kvi_global_route);
SIZE(ibv_ah_attr, kvi_ah_attr);
AT(ibv_ah_attr, kvi_ah_attr, dlid);
AT(ibv_ah_attr, kvi_ah_attr, is_global);
AT(ibv_ah_attr, kvi_ah_attr, port_num);
SIZE(ibv_qp_init_attr, kvi_qp_init_attr);
AT(ibv_qp_init_attr, kvi_qp_init_attr, cap);
AT(ibv_qp_init_attr, kvi_qp_init_attr, qp_type);
SIZE(ibv_qp_attr, kvi_qp_attr);
AT(ibv_qp_attr, kvi_qp_attr, path_mtu);
AT(ibv_qp_attr, kvi_qp_attr, rq_psn);
AT(ibv_qp_attr, kvi_qp_attr, sq_psn);
AT(ibv_qp_attr, kvi_qp_attr, dest_qp_num);
AT(ibv_qp_attr, kvi_qp_attr, qp_access_flags);
AT(ibv_qp_attr, kvi_qp_attr, ah_attr);
AT(ibv_qp_attr, kvi_qp_attr, max_rd_atomic);
AT(ibv_qp_attr, kvi_qp_attr, max_dest_rd_atomic);
AT(ibv_qp_attr, kvi_qp_attr, min_rnr_timer);
AT(ibv_qp_attr, kvi_qp_attr, port_num);
AT(ibv_qp_attr, kvi_qp_attr, timeout);
AT(ibv_qp_attr, kvi_qp_attr, retry_cnt);
AT(ibv_qp_attr, kvi_qp_attr, rnr_retry);
SIZE(ibv_sge, kvi_sge);
SIZE(ibv_send_wr, kvi_send_wr);
AT(ibv_send_wr, kvi_send_wr, opcode);
AT(ibv_send_wr, kvi_send_wr, send_flags);
AT(ibv_send_wr, kvi_send_wr, imm_data);
_Static_assert(offsetof(struct ibv_send_wr, wr.rdma.remote_addr) == offsetof(struct kvi_send_wr, remote_addr), "remote_addr is elsewhere");
_Static_assert(offsetof(struct ibv_send_wr, wr.rdma.rkey) == offsetof(struct kvi_send_wr, rkey), "rkey is elsewhere");
SIZE(ibv_recv_wr, kvi_recv_wr);
SIZE(ibv_wc, kvi_wc);
AT(ibv_wc, kvi_wc, status);
AT(ibv_wc, kvi_wc, opcode);
AT(ibv_wc, kvi_wc, imm_data);
AT(ibv_wc, kvi_wc, qp_num);
SIZE(ibv_async_event, kvi_async_event);
AT(ibv_async_event, kvi_async_event, event_type);

VALUE(PORT_ACTIVE);
VALUE(ACCESS_LOCAL_WRITE);
VALUE(ACCESS_REMOTE_WRITE);
VALUE(ACCESS_ON_DEMAND);
VALUE(QPT_RC);
VALUE(QPS_RESET);
VALUE(QPS_INIT);
VALUE(QPS_RTR);
VALUE(QPS_RTS);
VALUE(QPS_ERR);
VALUE(QP_STATE);
VALUE(QP_ACCESS_FLAGS);
VALUE(QP_PKEY_INDEX);
VALUE(QP_PORT);
VALUE(QP_AV);
VALUE(QP_PATH_MTU);
VALUE(QP_TIMEOUT);
VALUE(QP_RETRY_CNT);
VALUE(QP_RNR_RETRY);
VALUE(QP_RQ_PSN);
VALUE(QP_MAX_QP_RD_ATOMIC);
VALUE(QP_MIN_RNR_TIMER);
VALUE(QP_SQ_PSN);
VALUE(QP_MAX_DEST_RD_ATOMIC);
VALUE(QP_DEST_QPN);
VALUE(WR_RDMA_WRITE);
VALUE(WR_RDMA_WRITE_WITH_IMM);
VALUE(SEND_SIGNALED);
VALUE(SEND_INLINE);
VALUE(WC_SUCCESS);
VALUE(WC_LOC_PROT_ERR);
VALUE(WC_WR_FLUSH_ERR);
VALUE(WC_REM_ACCESS_ERR);
VALUE(WC_RETRY_EXC_ERR);
VALUE(WC_RNR_RETRY_EXC_ERR);
VALUE(WC_RECV_RDMA_WITH_IMM);
VALUE(EVENT_CQ_ERR);
VALUE(EVENT_QP_FATAL);
VALUE(EVENT_QP_REQ_ERR);
VALUE(EVENT_QP_ACCESS_ERR);
VALUE(EVENT_DEVICE_FATAL);
VALUE(EVENT_PORT_ACTIVE);
VALUE(EVENT_PORT_ERR);
VALUE(EVENT_LID_CHANGE);
VALUE(EVENT_GID_CHANGE);
_Static_assert((int)IBV_LINK_LAYER_ETHERNET == (int)KVI_LINK_ETHERNET, "IBV_LINK_LAYER_ETHERNET has another value");
