#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# quick.sh [prepare]: the part of `make test` that needs real queue pairs: the contract suite with each layout once, a key of another
# peer's, and late writes that the wire holds back, once after a cancel and once after a success, with their control run. prepare
# only fetches the guest, which may go on beside other parts. RDMA_DIR is where it is kept, .build/rdma without it.
#
# Where there is no QEMU to be had, or what the guest is made of, nothing was shown: the last line says "rdma: skipped" and why, and
# the status is 0, unless KVSPRAY_MUST_RUN names rdma. The same holds where the guest is not through in BUDGET, or its kernel crashes,
# before a test has failed. A single wait of these tests is allowed longer than any of them takes on a machine that just meets BUDGET.
set -euo pipefail
cd "$(dirname "$0")/../.."
readonly BUDGET=150  # seconds for the guest; 20 on an idle machine of two cores
readonly FETCH=300   # seconds for what it is made of; 50 with a fast archive
readonly EXPECT='TestDeviceConformance TestDeviceForeignKey TestDeviceLateWrites'
export RDMA_DIR=${RDMA_DIR:-$PWD/.build/rdma}
log=$RDMA_DIR/quick.log
mkdir -p "$RDMA_DIR"

skip() {
  echo "rdma: skipped: $1"
  case ",${KVSPRAY_MUST_RUN:-}," in *,rdma,*) exit 1 ;; esac
  exit 0
}
prepare() { # one at a time, and once: make knows what is there
  flock "$RDMA_DIR/.lock" timeout "$FETCH" nice -n 10 make -s rdma-guest >"$RDMA_DIR/prepare.log" 2>&1
}
if [ "${1:-}" = prepare ]; then
  prepare || true # whoever needs the guest tries again, and says why there is none
  exit 0
fi

[ "$(uname -s)/$(uname -m)" = Linux/x86_64 ] || skip "the guest is Linux on x86_64, this is $(uname -s) on $(uname -m)"
start=$SECONDS
prepare || skip "no guest: $(grep -v '^make' "$RDMA_DIR/prepare.log" | tail -n 1 | cut -c1-200) (all of it in $RDMA_DIR/prepare.log)"
binary=$RDMA_DIR/gdr.test
go test -c -o "$binary" ./transport/gdr
ready=$SECONDS
rc=0
(cd transport/gdr && KVSPRAY_ATTACK_RUNS=1 RAILS=2 GUEST_MEM=1024 GUEST_TIMEOUT=$BUDGET ../../test/rdma/exec.sh "$binary" \
  -test.short -test.v -test.run "^(${EXPECT// /|})\$") >"$log" 2>&1 || rc=$?
grep -q '^GUEST-READY' "$log" || skip "the guest does not boot within $((SECONDS - ready)) s: $(tail -n 1 "$log" | cut -c1-200) (all of it in $log)"
if ! grep -q -e '--- FAIL' "$log"; then
  case $rc in
    124) skip "the guest was not through after $BUDGET s: this machine is too slow, or too busy" ;;
    125) skip "the guest's kernel ended in mid test: $(tail -n 1 "$log" | cut -c1-200) (all of it in $log)" ;;
  esac
fi
for name in $EXPECT; do
  grep -q "^--- PASS: $name " "$log" || { echo "$name did not pass"; rc=1; }
done
((rc == 0)) || cat "$log"
echo "rdma: $(grep -cE '^ *--- PASS' "$log" || true) passed, $(grep -cE '^ *--- FAIL' "$log" || true) failed on soft-RoCE; $((ready - start)) s to make the guest and the test, $((SECONDS - ready)) s in it"
((rc == 0))
