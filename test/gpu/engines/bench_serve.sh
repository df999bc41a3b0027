#!/usr/bin/env bash
# Part serve of measure.py with the shape of an 8B model. Results go to $OUT (default .build/gpu/out). $TOY_PROXY is vLLM's
# toy_proxy_server.py, which the arms with NIXL need.
#
# usage: bench_serve.sh [options of measure.py]
set -euo pipefail
cd "$(dirname "$0")/../../.."
rig=${KVSPRAY_RIG_ROOT:-/opt/rig}
python3 test/gpu/engines/unpack.py --to "$rig" .build/gpu/pk .build/gpu/pk-more
python3 test/gpu/engines/models.py "$rig/models" llama-8b:config
# Without the variable UCX takes TCP between two engines of one GPU.
UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y exec python3 test/gpu/engines/measure.py serve --model llama-8b --max-len 18000 --cache-mb 14000 \
  ${TOY_PROXY:+--toy-proxy "$TOY_PROXY"} "$@"
