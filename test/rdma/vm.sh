#!/usr/bin/env bash
# vm.sh DIR SHARE SCRIPT [KERNEL-ARGUMENT...]: boots a guest that sees the folder SHARE as /mnt and runs SCRIPT there. Shows
# its console, and ends with the script's status; 124: it was not through in time; 125: it ended by itself, and where its kernel
# crashed the last line says so. GUEST_NET adds devices, GUEST_MEM (MiB), GUEST_CPUS and GUEST_TIMEOUT (s) bound it,
# GUEST_NICE (10) is how far it stands back.
set -uo pipefail
dir=$(realpath "$1") share=$2 script=$3
shift 3
console=$(mktemp "$dir/console.XXXXXX")
trap 'rm -f "$console"' EXIT
kernel=$dir/vmlinux
[ -e "$kernel" ] || kernel=$dir/kernel/boot/vmlinuz-$(ls "$dir/kernel/lib/modules")
# Emulation works everywhere; a /dev/kvm that is there may still not start a guest, so it is asked for by GUEST_ACCEL=kvm.
accel=${GUEST_ACCEL:-tcg,thread=multi}
# no_timer_check: where the host is busy the emulated timer's interrupts come too late for the kernel's check at boot, and it panics.
# shellcheck disable=SC2086
nice -n "${GUEST_NICE:-10}" timeout --foreground "${GUEST_TIMEOUT:-1800}" qemu-system-x86_64 -accel "$accel" -cpu qemu64 -M q35 -smp "${GUEST_CPUS:-2}" -m "${GUEST_MEM:-2048}" \
  -nodefaults -no-user-config -display none -no-reboot -serial stdio \
  -fsdev "local,id=share,path=$share,security_model=none" -device virtio-9p-pci,fsdev=share,mount_tag=share ${GUEST_NET:-} \
  -kernel "$kernel" -initrd "$dir/initrd.cpio" \
  -append "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check run=$script $*" </dev/null 2>&1 | sed -u 's|\r||g' | tee "$console" | sed -u '/^GUEST-EXIT:/d'
qemu=${PIPESTATUS[0]}
status=$(sed -n 's/^GUEST-EXIT://p' "$console" | tail -n 1)
if [ -z "$status" ]; then
  echo "the guest ended without a status (QEMU: $qemu)" >&2
  ((qemu != 124)) || exit 124 # it took longer than GUEST_TIMEOUT
  panic=$(sed -n 's/.*\(Kernel panic - .*\)/\1/p' "$console" | tail -n 1)
  at=$(sed -n 's/.*RIP: 0010:\([^ ]*\).*/\1/p' "$console" | tail -n 1)
  [ -z "$panic" ] || echo "the guest's kernel crashed, so nothing was shown: $panic${at:+, at $at}" >&2
  exit 125
fi
exit "$status"
