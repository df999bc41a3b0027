#!/usr/bin/env bash
# The demonstration on a GPU: prefill on one CUDA vLLM, decode on another, both on this host's GPU, two sidecars between them, a
# plain engine beside them. Answers and page hashes are compared, the time to the first token is shown beside the plain engine's,
# how much was there before the prefill ended, and what the transfers cost the prefill. `make gpu-bin` packs what it needs, ahead
# and elsewhere. Results go to $OUT (default .build/gpu/out); the status is 0 only if nothing differs.
#
# usage: demo.sh [options of measure.py]        MODEL=llama-1b
set -euo pipefail
cd "$(dirname "$0")/../../.."
rig=${KVSPRAY_RIG_ROOT:-/opt/rig} model=${MODEL:-llama-1b}
python3 test/gpu/engines/unpack.py --to "$rig"
python3 test/gpu/engines/models.py "$rig/models" "$model"
python3 test/gpu/engines/measure.py pages ttft cost --model "$model" --tag demo \
  --prompts 40 --together 1 --like-plain --rounds 6 --lengths 128,1024,3900,16000 --pairs 10 "$@"
