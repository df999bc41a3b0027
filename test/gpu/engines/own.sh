#!/usr/bin/env bash
# Runs a program of test/gpu, such as copies.py or e2e.py, with the kvspray that unpack.py has unpacked: own.sh copies.py OPTIONS.
# Its report is $OUT/REPORT.json (REPORT is the program's name without .py if it is not set).
set -euo pipefail
cd "$(dirname "$0")/../../.."
rig=${KVSPRAY_RIG_ROOT:-/opt/rig} program=$1
shift
PYTHONPATH=$rig/own exec python3 "test/gpu/$program" --kvspray "$rig/own/bin/kvspray" --json "$OUT/${REPORT:-${program%.py}}.json" "$@"
