#!/usr/bin/env bash
# quick.sh: the part of `make test-all` that needs real queue pairs, in two guests one after the other. The backend: the contract
# suite with each layout once, a key of another peer's, and late writes that the wire holds back, once after a cancel and once after a success,
# with their control run. Two sidecars: 64 MiB over four rails, once for each way in which a rail can fail. RDMA_DIR is where the guest
# is kept, .build/rdma without it.
#
# Where there is no QEMU to be had, or what the guest is made of, nothing was shown: the last line says "rdma: skipped" and why, and
# the status is 0, unless KVSPRAY_MUST_RUN names rdma. The same holds where a guest is not through in BUDGET, or its kernel crashes,
# before a test has failed. A single wait of these tests is allowed longer than any of them takes on a machine that just meets BUDGET.
set -euo pipefail
cd "$(dirname "$0")/../.."
readonly BUDGET=300 # seconds for a guest, 20 and 30 on an idle machine of two cores; a transfer that never ends fails after 120
readonly FETCH=300  # seconds for what they are made of; 50 with a fast archive
export RDMA_DIR=${RDMA_DIR:-$PWD/.build/rdma}
mkdir -p "$RDMA_DIR"

passed=0 failed=0 took=0
skip() { # what has failed before stays failed
  if ((failed)); then
    echo "rdma: $failed failed; then: $1"
    exit 1
  fi
  echo "rdma: skipped: $1"
  case ",${KVSPRAY_MUST_RUN:-}," in *,rdma,*) exit 1 ;; esac
  exit 0
}
prepare() { # one at a time, and once: make knows what is there
  flock "$RDMA_DIR/.lock" timeout "$FETCH" nice -n 10 make -s rdma-guest >"$RDMA_DIR/prepare.log" 2>&1
}
guest() { # PACKAGE TEST...: runs them in a guest of their own, and each has to pass
  local package=$1 log=$RDMA_DIR/quick-${1##*/}.log binary=$RDMA_DIR/${1##*/}.test start rc=0 name
  shift
  go test -c -o "$binary" "$package"
  start=$SECONDS
  (cd "$package" && GUEST_TIMEOUT=$BUDGET "$OLDPWD/test/rdma/exec.sh" "$binary" -test.short -test.v -test.run "^($(IFS='|'; echo "$*"))\$") >"$log" 2>&1 || rc=$?
  took=$((took + SECONDS - start))
  grep -q '^GUEST-READY' "$log" || skip "the guest does not boot within $((SECONDS - start)) s: $(tail -n 1 "$log" | cut -c1-200) (all of it in $log)"
  if ! grep -q -e '--- FAIL' "$log"; then
    case $rc in
      124) skip "a guest was not through after $BUDGET s, with $package: this machine is too slow, or too busy" ;;
      125) skip "a guest's kernel ended in mid test of $package: $(tail -n 1 "$log" | cut -c1-200) (all of it in $log)" ;;
    esac
  fi
  for name in "$@"; do
    grep -q "^--- PASS: $name " "$log" || { echo "$name did not pass"; rc=1; }
  done
  ((rc == 0)) || cat "$log"
  passed=$((passed + $(grep -cE '^ *--- PASS' "$log" || true))) failed=$((failed + $(grep -cE '^ *--- FAIL' "$log" || true) + (rc != 0)))
}

[ "$(uname -s)/$(uname -m)" = Linux/x86_64 ] || skip "the guest is Linux on x86_64, this is $(uname -s) on $(uname -m)"
prepare || skip "no guest: $(grep -v '^make' "$RDMA_DIR/prepare.log" | tail -n 1 | cut -c1-200) (all of it in $RDMA_DIR/prepare.log)"
KVSPRAY_ATTACK_RUNS=1 RAILS=2 GUEST_MEM=1024 guest ./transport/gdr TestDeviceConformance TestDeviceForeignKey TestDeviceLateWrites
KVSPRAY_RDMA_LAYERS=4 RAILS=4 GUEST_MEM=1536 guest ./sidecar TestRDMAFaults
echo "rdma: $passed passed, $failed failed on soft-RoCE, $took s in its guests"
((failed == 0))
