#!/usr/bin/env bash
# initramfs.sh DIR: packs DIR/initrd.cpio from what fetch.sh unpacked and from this machine's iproute2 and C library, and unpacks
# the kernel. Neither is compressed: emulated processors take seconds to unpack what this one unpacks once.
set -euo pipefail
dir=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
root=$dir/root
arch=x86_64-linux-gnu
version=$(ls "$dir/kernel/lib/modules")
modules=$dir/kernel/lib/modules/$version
out=$(mktemp -d "$dir/initrd.XXXXXX")
trap 'rm -rf "$out"' EXIT

mkdir -p "$out"/{bin,sbin,dev,proc,sys,tmp,mnt,run,lib64,usr/bin,usr/lib/tc,etc/libibverbs.d} "$out/usr/lib/$arch"/{libibverbs,xtables} "$out/lib/modules/$version"
ln -s "../usr/lib/$arch" "$out/lib/$arch"
cp "$root/bin/busybox" "$out/bin/"
"$root/bin/busybox" --list | while read -r applet; do
  # ip and tc are iproute2's, and the shell is dash: busybox's has an ip of its own inside, which knows less.
  case $applet in busybox | ip | tc | sh) ;; *) ln -s busybox "$out/bin/$applet" ;; esac
done
ln -s ../bin/busybox "$out/sbin/modprobe" # the kernel asks for modules by this name
cp -L "$(command -v dash)" "$out/bin/sh"
cp -L "$(command -v ip)" "$(command -v tc)" "$(command -v rdma)" "$out/bin/"
cp -L "$root"/usr/bin/{ibv_devinfo,ib_write_bw,ib_write_lat} "$root/usr/sbin/xtables-legacy-multi" "$out/usr/bin/"
ln -s xtables-legacy-multi "$out/usr/bin/iptables"
cp "$root/etc/libibverbs.d/rxe.driver" "$out/etc/libibverbs.d/"
cp "$root/usr/lib/$arch"/libibverbs/librxe-*.so "$out/usr/lib/$arch/libibverbs/"
cp "$root/usr/lib/$arch"/xtables/libxt_{standard,udp,tcp,statistic,length}.so "$out/usr/lib/$arch/xtables/"

# Libraries of all these, and of cgo binaries that are carried in.
cp -L "$root/usr/lib/$arch/libibverbs.so.1" "$out/usr/lib/$arch/"
{
  export LD_LIBRARY_PATH=$root/usr/lib/$arch:$root/lib/$arch
  for file in "$out"/usr/bin/* "$out"/bin/{ip,tc,rdma} "$out/usr/lib/$arch"/*.so* "$out/usr/lib/$arch"/{libibverbs,xtables}/*.so; do
    [ -L "$file" ] || ldd "$file" 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// {print $3} $1 ~ /ld-linux/ {print $1}'
  done
  for name in libpthread.so.0 libdl.so.2 librt.so.1 libresolv.so.2 libgcc_s.so.1; do
    ldconfig -p | awk -v n="$name" '$1 == n && !found++ {print $NF}' # to its end: who writes into a closed pipe dies, and the script with it
  done
} | sort -u | while read -r lib; do
  case $lib in
    */ld-linux*) cp -L "$lib" "$out/lib64/" ;;
    *) cp -L "$lib" "$out/usr/lib/$arch/" ;;
  esac
done

# Modules with what they depend on.
wanted="virtio_pci 9pnet_virtio 9p virtio_net veth rdma_rxe ib_uverbs sch_netem sch_plug sch_prio iptable_filter xt_tcpudp xt_statistic xt_length crc32_generic crc32-pclmul"
for m in $wanted; do
  grep -E "/$m\.ko:" "$modules/modules.dep" || grep -qE "/$m\.ko" "$modules/modules.builtin" || { echo "no module $m" >&2; exit 1; }
done | tr -d : | tr ' ' '\n' | sort -u | while read -r file; do
  [ -n "$file" ] || continue
  mkdir -p "$out/lib/modules/$version/$(dirname "$file")"
  cp "$modules/$file" "$out/lib/modules/$version/$file"
done
"$root/bin/busybox" depmod -b "$out" "$version"
install -m 755 "$here/guest/init" "$out/init"
cp "$here/guest/rails.sh" "$out/rails.sh"
# An ELF kernel starts without a BIOS (PVH). Where this one cannot be unpacked the guest takes 4 s longer to boot, no more.
rm -f "$dir/vmlinux"
if python3 - "$dir/kernel/boot/vmlinuz-$version" "$dir/vmlinux.new" <<'EOF'; then mv "$dir/vmlinux.new" "$dir/vmlinux"; fi
import lzma, struct, sys
image = open(sys.argv[1], "rb").read()
setup = (image[0x1F1] + 1) * 512  # Documentation/arch/x86/boot.rst: setup_sects, then payload_offset from the end of the setup
payload = image[setup + struct.unpack_from("<I", image, 0x248)[0] :]
elf = lzma.LZMADecompressor().decompress(payload)
assert elf[:4] == b"\x7fELF"
open(sys.argv[2], "wb").write(elf)
EOF
(cd "$out" && find . | "$root/bin/busybox" cpio -o -H newc 2>/dev/null) >"$dir/initrd.cpio.new"
mv "$dir/initrd.cpio.new" "$dir/initrd.cpio"
