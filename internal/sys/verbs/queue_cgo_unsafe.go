//go:build cgo && linux

package verbs

// #include "abi.h"
// #include "library.h"
import "C"

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"
)

type completionQueue struct {
	c     *C.struct_kvv_cq
	file  *os.File
	ready chan struct{}
	wg    sync.WaitGroup

	mu     sync.Mutex
	closed bool // guarded by mu, as what follows
	n      C.int
	buf    [pollBatch]C.struct_kvv_done
}

func (d *device) NewCompletionQueue(depth int) (CompletionQueue, error) {
	if depth < 1 || depth > d.limits.MaxCompletions {
		return nil, fmt.Errorf("verbs: completion queue of %d with %s: 1 to %d: %w", depth, d.name,
			d.limits.MaxCompletions, ErrFull)
	}
	q := &completionQueue{ready: make(chan struct{}, 1)}
	var fd C.int
	if err := check("create a completion queue with "+d.name, C.kvv_cq_create(d.c, C.int(depth), &q.c,
		&fd)); err != nil {
		return nil, err
	}
	var err error
	if q.file, err = watched(int(fd), "rdma-completions"); err != nil {
		C.kvv_cq_destroy(q.c)
		return nil, err
	}
	q.wg.Go(func() {
		await(q.file, func() C.int {
			r := C.kvv_cq_event(q.c)
			if r == 0 {
				select {
				case q.ready <- struct{}{}:
				default:
				}
			}
			return r
		})
	})
	return q, nil
}

func (q *completionQueue) Ready() <-chan struct{} { return q.ready }

func (q *completionQueue) Poll(dst []Completion) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return 0, net.ErrClosed
	}
	r := C.kvv_cq_poll(q.c, &q.buf[0], C.int(min(len(dst), pollBatch)), &q.n)
	for i := range int(q.n) {
		c := &q.buf[i]
		dst[i] = Completion{ID: uint64(c.id), QP: uint32(c.qp), Imm: uint32(c.imm),
			Status: status(c.status), Code: int(c.status)}
		if c.status == C.KVI_WC_SUCCESS && c.opcode == C.KVI_WC_RECV_RDMA_WITH_IMM {
			dst[i].Op = Receive
		} else if c.status == C.KVI_WC_SUCCESS {
			dst[i].Op = Write
		}
	}
	return int(q.n), check("poll", r)
}

func status(s C.int32_t) Status {
	switch s {
	case C.KVI_WC_SUCCESS:
		return OK
	case C.KVI_WC_WR_FLUSH_ERR:
		return Flushed
	case C.KVI_WC_LOC_PROT_ERR:
		return LocalAccess
	case C.KVI_WC_REM_ACCESS_ERR:
		return RemoteAccess
	case C.KVI_WC_RETRY_EXC_ERR:
		return RetryExceeded
	case C.KVI_WC_RNR_RETRY_EXC_ERR:
		return ReceiverNotReady
	}
	return Broken
}

func (q *completionQueue) Close() error {
	_ = q.file.Close() // the duplicate
	q.wg.Wait()
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return nil
	}
	if err := check("destroy a completion queue", C.kvv_cq_destroy(q.c)); err != nil {
		return err
	}
	q.closed = true
	return nil
}

type queuePair struct {
	d      *device
	num    uint32
	psn    uint32
	inline int

	mu     sync.Mutex
	c      *C.struct_kvv_qp // nil once closed; guarded by mu, as what follows
	state  State
	posted C.int
	work   [sendBatch]C.struct_kvv_work
}

func (p *domain) NewQueuePair(cq CompletionQueue, sends, receives int) (QueuePair, error) {
	c, ok := cq.(*completionQueue)
	if !ok {
		return nil, errors.New("verbs: queue pair: the completion queue is of another kind of device")
	}
	d := p.d
	if m := d.limits.MaxWork; sends < 1 || sends > m || receives < 1 || receives > m {
		return nil, fmt.Errorf("verbs: queue pair of %d sends and %d receives with %s: 1 to %d each: %w",
			sends, receives, d.name, m, ErrFull)
	}
	q := &queuePair{d: d, psn: rand.Uint32N(1 << psnBits)}
	var num C.uint32_t
	var inline C.int
	if r := C.kvv_qp_create(p.c, c.c, C.int(sends), C.int(receives), &q.c, &num, &inline); r != 0 {
		return nil, RefuseQueuePair(check("create a queue pair with "+d.name, r), d.name,
			int(d.queuePairs.Load()), d.limits)
	}
	d.queuePairs.Add(1)
	q.num, q.inline = uint32(num), int(inline)
	return q, nil
}

func (q *queuePair) Num() uint32    { return q.num }
func (q *queuePair) MaxInline() int { return q.inline }

func (q *queuePair) Address() Address {
	return Address{GID: q.d.gid.Raw, QP: q.num, PSN: q.psn, LID: q.d.lid, MTU: q.d.mtu,
		Type: q.d.gid.Type}
}

func (q *queuePair) State() State {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.state
}

// move makes one transition.
func (q *queuePair) move(to State, f func() C.int) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.c == nil {
		return net.ErrClosed
	}
	if err := check(fmt.Sprintf("queue pair %d of %s to %s", q.num, q.d.name, to), f()); err != nil {
		return err
	}
	q.state = to
	return nil
}

func (q *queuePair) ToInit() error {
	return q.move(Init, func() C.int { return C.kvv_qp_init(q.c, C.uint8_t(q.d.cfg.Port)) })
}

func (q *queuePair) ToReadyToReceive(remote Address) error {
	if err := CheckPeer(q.Address(), remote); err != nil {
		return err
	}
	p := C.struct_kvv_path{qp: C.uint32_t(remote.QP), psn: C.uint32_t(remote.PSN),
		lid: C.uint16_t(remote.LID), port: C.uint8_t(q.d.cfg.Port),
		gid_index: C.uint8_t(q.d.gid.Index), mtu: C.uint8_t(min(q.d.mtu, remote.MTU)),
		traffic_class: C.uint8_t(q.d.cfg.TrafficClass),
		service_level: C.uint8_t(q.d.cfg.ServiceLevel), hop_limit: hopLimit,
		reads: C.uint8_t(q.d.reads)}
	// Within an InfiniBand subnet the LID suffices; otherwise routing is by GID.
	if remote.Type != GIDInfiniBand || remote.LID == 0 {
		p.is_global = 1
	}
	for i, b := range remote.GID {
		p.gid[i] = C.uint8_t(b)
	}
	return q.move(ReadyToReceive, func() C.int { return C.kvv_qp_rtr(q.c, &p) })
}

func (q *queuePair) ToReadyToSend() error {
	return q.move(ReadyToSend, func() C.int {
		return C.kvv_qp_rts(q.c, C.uint32_t(q.psn), C.uint8_t(q.d.cfg.Timer),
			C.uint8_t(q.d.cfg.Retries), C.uint8_t(q.d.reads))
	})
}

func (q *queuePair) ToError() error {
	return q.move(Error, func() C.int { return C.kvv_qp_error(q.c) })
}
func (q *queuePair) ToReset() error {
	return q.move(Reset, func() C.int { return C.kvv_qp_reset(q.c) })
}

func (q *queuePair) PostSend(batch []Work) (taken int, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.c == nil {
		return 0, net.ErrClosed
	}
	for taken < len(batch) {
		n := min(len(batch)-taken, sendBatch)
		for i := range n {
			w := &batch[taken+i]
			q.work[i] = C.struct_kvv_work{id: C.uint64_t(w.ID), local_addr: C.uint64_t(w.LocalAddr),
				remote_addr: C.uint64_t(w.RemoteAddr),
				local_key:   C.uint32_t(w.LocalKey), remote_key: C.uint32_t(w.RemoteKey),
				len:      C.uint32_t(w.Len),
				imm:      C.uint32_t(w.Imm),
				with_imm: bit(w.Op == WriteImm), signaled: bit(w.Signaled), inlined: bit(w.Inline && w.Len > 0)}
		}
		r := C.kvv_qp_send(q.c, &q.work[0], C.int(n), &q.posted)
		taken += int(q.posted)
		if r != 0 {
			err := check(fmt.Sprintf("post to queue pair %d of %s", q.num, q.d.name), r)
			if errors.Is(err, syscall.ENOMEM) {
				err = fmt.Errorf("%w: %w", ErrFull, err)
			}
			return taken, err
		}
	}
	return taken, nil
}

func bit(b bool) C.uint8_t {
	if b {
		return 1
	}
	return 0
}

func (q *queuePair) PostReceive(ids []uint64) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.c == nil {
		return net.ErrClosed
	}
	if len(ids) == 0 {
		return nil
	}
	return check(fmt.Sprintf("post receives to queue pair %d of %s", q.num, q.d.name),
		C.kvv_qp_receive(q.c, (*C.uint64_t)(unsafe.Pointer(&ids[0])), C.int(len(ids))))
}

func (q *queuePair) Close() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.c == nil {
		return nil
	}
	if err := check(fmt.Sprintf("destroy queue pair %d of %s", q.num, q.d.name),
		C.kvv_qp_destroy(q.c)); err != nil {
		return err
	}
	q.d.queuePairs.Add(-1)
	q.c, q.state = nil, Reset
	return nil
}
