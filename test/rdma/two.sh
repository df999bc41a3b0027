#!/usr/bin/env bash
# two.sh BINARY ARGUMENT...: runs a test binary in two guests at once, as two hosts that RAILS network cards join. Each sees its
# number in KVSPRAY_RDMA_NODE (1 or 2), and a folder that both share in KVSPRAY_RDMA_SHARE. Ends with success if both do; where one
# ends without a status, as by a crash of its kernel, the other one is ended.
# RDMA_DIR is where fetch.sh put the guest.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
share=$(mktemp -d "${TMPDIR:-/tmp}/kvspray-rdma.XXXXXX")
guests=()
trap 'stop; wait; rm -rf "$share"' EXIT
stop() { # each guest is a process group of its own
  local pid
  for pid in "${guests[@]}"; do kill -- "-$pid" 2>/dev/null || true; done
}
binary=$1
shift
mkdir "$share/both"
cp "$binary" "$share/binary"
for node in 1 2; do
  {
    echo 'cp /mnt/binary /tmp/binary; cd /tmp'
    env | sed -n "s/^\(KVSPRAY_[A-Z_]*\)=\(.*\)/export \1='\2'/p"
    echo "export KVSPRAY_MUST_RUN=\${KVSPRAY_MUST_RUN:-rdma,gdr} GOTRACEBACK=all KVSPRAY_RDMA_NODE=$node KVSPRAY_RDMA_SHARE=/mnt/both"
    printf 'exec /tmp/binary'
    printf ' %q' "$@"
    echo
  } >"$share/run$node.sh"
done
cards() { # NODE: one card per rail, wired to the other guest's by a pair of sockets
  local i
  for ((i = 0; i < ${RAILS:-2}; i++)); do
    echo "-netdev dgram,id=n$i,local.type=unix,local.path=$share/n$i.$1,remote.type=unix,remote.path=$share/n$i.$((3 - $1))"
    echo "-device virtio-net-pci,netdev=n$i,host_mtu=4500,mac=52:54:00:00:0$i:0$1"
  done
}
for node in 1 2; do
  GUEST_CPUS=${GUEST_CPUS:-1} GUEST_MEM=${GUEST_MEM:-1536} GUEST_NET=$(cards $node | tr '\n' ' ') \
    setsid "$here/vm.sh" "$RDMA_DIR" "$share" "run$node.sh" "node=$node" >"$share/log$node" 2>&1 &
  guests+=($!)
done
status=0
for node in 1 2; do
  ended=0
  wait -n || ended=$?
  ((ended < 124)) || stop # who is alone now would wait for its own time
  ((status)) || status=$ended
done
for node in 1 2; do sed "s/^/host $node: /" "$share/log$node"; done
exit "$status"
