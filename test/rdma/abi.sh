#!/usr/bin/env bash
# abi.sh DIR: compares what internal/sys/verbs/abi.h restates with rdma-core's own header, at compile time.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
gcc -std=gnu11 -Wall -Werror -fsyntax-only -I"$1/root/usr/include" -I"$here/../../internal/sys/verbs" -x c "$here/abi_check.c"
echo "abi.h agrees with rdma-core's header"
