#!/usr/bin/env bash
# fetch.sh DIR: what a guest with soft-RoCE is made of, from the distribution's own archive, unpacked below DIR and never
# installed. QEMU alone is installed, where it is missing and the user may.
#
#   DIR/kernel   the stock kernel and its modules (the cloud kernel has no rdma_rxe)
#   DIR/root     busybox, rdma-core, perftest, iptables, and the headers that test/rdma/abi.sh checks against
#
# Needs Debian 12 or another system whose apt knows these packages.
set -euo pipefail
mkdir -p "$1"
dir=$(realpath "$1")
stamp=$dir/.fetched
[ -e "$stamp" ] && exit 0
packages=(busybox-static ibverbs-providers ibverbs-utils iptables libibumad3 libibverbs-dev libibverbs1 libip4tc2 libip6tc2
  libnl-3-200 libnl-route-3-200 libpci3 librdmacm1 libxtables12 perftest)

need() { echo "test-rdma: $1" >&2; exit 1; }
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || need "apt-get and dpkg-deb are needed: run it on Debian 12, or in a container of it"
image() { apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | awk 'NR == 1'; }
missing=0
for tool in qemu-system-x86_64 ip tc rdma; do command -v "$tool" >/dev/null || missing=1; done
if [ -z "$(image)" ] || ((missing)); then
  [ "$(id -u)" = 0 ] || ((!missing)) || need "qemu-system-x86_64 or iproute2 is missing: apt-get install qemu-system-x86 iproute2"
  [ "$(id -u)" != 0 ] || timeout 180 apt-get update -qq
fi
if ((missing)); then
  echo "test-rdma: installing QEMU ..."
  DEBIAN_FRONTEND=noninteractive timeout 600 apt-get install -y -qq --no-install-recommends qemu-system-x86 iproute2 >/dev/null
fi
kernel=$(image)
[ -n "$kernel" ] || need "apt knows no linux-image-amd64: run it on Debian 12"
rm -rf "$dir/debs" "$dir/kernel" "$dir/root"
mkdir -p "$dir"/{debs,kernel,root}
echo "test-rdma: fetching $kernel and ${#packages[@]} packages ..."
(cd "$dir/debs" && timeout 600 apt-get download -qq "$kernel" "${packages[@]}" 2>/dev/null)
for deb in "$dir"/debs/*.deb; do
  case $deb in
    */linux-image-*) dpkg-deb -x "$deb" "$dir/kernel" ;;
    *) dpkg-deb -x "$deb" "$dir/root" ;;
  esac
done
rm -rf "$dir/debs"
"$dir/root/bin/busybox" depmod -b "$dir/kernel" "$(ls "$dir/kernel/lib/modules")"
touch "$stamp"
