#!/usr/bin/env bash
# What needs a GPU, on a host that has a driver, python3 with torch, and nothing else. `make gpu-bin` builds what it runs, ahead and
# elsewhere, into .build/gpu. Results go to the folder $OUT (default .build/gpu/out).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-.build/gpu/out}
mkdir -p "$out"
export PYTHONPATH=$PWD/.build/gpu/py
rc=0
python3 test/gpu/signals.py --json "$out/signals.json" || rc=$?
gpus=$(nvidia-smi --list-gpus | wc -l)
.build/gpu/kvspray-bench gpu --json "$out/gpu.json" --html "$out/gpu.html" || rc=$?
python3 test/gpu/e2e.py --kvspray .build/gpu/kvspray --gpus 0,$((gpus > 1 ? 1 : 0)) --json "$out/e2e.json" || rc=$?
.build/gpu/kvspray calibrate --out "$out/gpu-table.json" || rc=$?
python3 test/gpu/copies.py --set transports.gpu.calibration="$out/gpu-table.json" --kvspray .build/gpu/kvspray --gpus "$(seq -s, 0 $((gpus - 1)))" --json "$out/copies.json" || rc=$?
python3 test/gpu/links.py --set transports.gpu.calibration="$out/gpu-table.json" --kvspray .build/gpu/kvspray --gpus "$(seq -s, 0 $((gpus - 1)))" --json "$out/links.json" || rc=$?
exit $rc
