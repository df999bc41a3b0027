#!/usr/bin/env bash
# exec.sh BINARY ARGUMENT...: for `go test -exec`: runs a test binary in a guest of its own. RDMA_DIR is where fetch.sh put the
# guest, RAILS how many rails it has. Variables KVSPRAY_* are passed on.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
share=$(mktemp -d "${TMPDIR:-/tmp}/kvspray-rdma.XXXXXX")
trap 'rm -rf "$share"' EXIT
binary=$1
shift
mkdir "$share/work"
cp "$binary" "$share/binary"
if [ -d testdata ]; then cp -r testdata "$share/work/"; fi
{
  echo 'cp /mnt/binary /tmp/binary; cd /mnt/work'
  env | sed -n "s/^\(KVSPRAY_[A-Z_]*\)=\(.*\)/export \1='\2'/p"
  echo "export KVSPRAY_MUST_RUN=\${KVSPRAY_MUST_RUN:-rdma,gdr} GOTRACEBACK=all"
  printf 'exec /tmp/binary'
  printf ' %q' "$@"
  echo
} >"$share/run.sh"
"$here/vm.sh" "$RDMA_DIR" "$share" run.sh "rails=${RAILS:-4}"
