#!/usr/bin/env bash
# The part of run.sh that is about copies and the table of GPUs, in two minutes: the table measured under load, copies by a real sidecar that
# uses it (TABLE=off: what is built in), and the ceilings. Needs what run.sh needs; results go to $OUT.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-.build/gpu/out}
mkdir -p "$out"
export PYTHONPATH=$PWD/.build/gpu/py
gpus=$(seq -s, 0 $(($(nvidia-smi --list-gpus | wc -l) - 1)))
rc=0
time .build/gpu/kvspray calibrate --out "$out/gpu-table.json" || rc=$?
python3 test/gpu/copies.py --kvspray .build/gpu/kvspray --gpus "$gpus" --set transports.gpu.calibration="${TABLE:-$out/gpu-table.json}" --json "$out/copies.json" || rc=$?
.build/gpu/kvspray-bench gpu multipath --repeat 5 --json "$out/multipath.json" || rc=$?
exit $rc
