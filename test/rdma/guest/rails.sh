# Makes the rails of a guest; sourced by init.
#
# One guest: rail i is a veth pair, r<i>a and r<i>b, with a soft-RoCE device on each end and addresses 10.9.<i>.1 and .2. All
# are in the first network namespace, because this kernel's rxe carries nothing in another one. The rules put the local table
# behind routes through the veth for what this host sends itself, so that every packet crosses the rail, where it can be lost.
#
# One of two guests (node=1 or 2): rail i is the i-th virtio card, which leads to the other guest.
mtu=${mtu:-4500} # RoCE MTU 4096
for file in all/rp_filter default/rp_filter; do echo 0 >/proc/sys/net/ipv4/conf/$file; done
for file in all/accept_local default/accept_local all/arp_ignore; do echo 1 >/proc/sys/net/ipv4/conf/$file; done
echo 2 >/proc/sys/net/ipv4/conf/all/arp_announce
if [ -n "${node:-}" ]; then
  # napi_tx=0: a packet is its sender's until the card has it, not until the card has sent it. Otherwise those in the ring of a link that is
  # down are a queue pair's until it is up again; this kernel's rxe destroys the queue pair after 50 s all the same, and the link's coming up
  # is a crash, in rxe_skb_tx_dtor.
  modprobe virtio_net napi_tx=0 && grep -q N /sys/module/virtio_net/parameters/napi_tx || return 1
  i=0
  while [ -e /sys/class/net/eth$i ]; do
    ip addr add 10.9.$i.$node/24 dev eth$i && ip link set eth$i mtu $mtu up && rdma link add r$i type rxe netdev eth$i || return 1
    i=$((i + 1))
  done
  return 0
fi
i=0
while [ $i -lt "${rails:-2}" ]; do
  ip link add r${i}a type veth peer name r${i}b || return 1
  ip addr add 10.9.$i.1/24 dev r${i}a
  ip addr add 10.9.$i.2/24 dev r${i}b
  ip link set r${i}a mtu $mtu up
  ip link set r${i}b mtu $mtu up
  ip route add 10.9.$i.2 dev r${i}a src 10.9.$i.1 table $((100 + i))
  ip route add 10.9.$i.1 dev r${i}b src 10.9.$i.2 table $((100 + i))
  ip rule add pref 10 iif lo to 10.9.$i.0/24 lookup $((100 + i))
  rdma link add r${i}a type rxe netdev r${i}a && rdma link add r${i}b type rxe netdev r${i}b || return 1
  i=$((i + 1))
done
ip rule add pref 100 lookup local && ip rule del pref 0
