#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# run.sh MODE: what `make test`, `make test-all` and `make test-attack` run. Every part runs, also after
# one that failed. The end is a line for each part and the status of the whole. The output of each
# part goes to the terminal and to .build/test-MODE/PART.log.
set -euo pipefail
cd "$(dirname "$0")/.."
mode=${1:-test}
target="make test"
[ "$mode" = test ] || target="make test-$mode"
logs=.build/test-$mode
mkdir -p "$logs" && rm -f "$logs"/*.rc "$logs"/*.log
summary=()
failed=0
# Each skipped test of Go's adds a line (internal/testutil.Skip); those of Python's are in their parts' logs.
export KVSPRAY_SKIPS=$PWD/$logs/skips.go
: >"$KVSPRAY_SKIPS"
declare -A besides=()

told() { # NAME WHAT-THE-LAST-LINE-MATCHES STATUS SECONDS: a part has ended
	local last verdict=ok
	last=$(grep -E "$2" "$logs/$1.log" | tail -n 1 || true)
	if (($3 != 0)); then
		verdict=FAILED
		failed=1
	fi
	summary+=("$(printf '%-10s %-6s %4d s  %s' "$1" "$verdict" "$4" "$last")")
}

part() { # NAME WHAT-THE-LAST-LINE-MATCHES COMMAND...
	local name=$1 closing=$2
	shift 2
	if [[ " ${KVSPRAY_LEAVE_OUT:-} " == *" $name "* ]]; then
		summary+=("$(printf '%-10s %-6s %4d s  %s' "$name" "left out" 0 "by KVSPRAY_LEAVE_OUT")")
		return
	fi
	echo "=== $name: $*"
	local start=$SECONDS rc=0
	"$@" 2>&1 | tee "$logs/$name.log" || rc=$?
	told "$name" "$closing" "$rc" $((SECONDS - start))
}

beside() { # NAME COMMAND...: a part that mostly waits runs beside those that follow, until joined
	local name=$1
	shift
	echo "=== $name, beside what follows: $*"
	{
		local start=$SECONDS rc=0
		"$@" >"$logs/$name.log" 2>&1 || rc=$?
		echo "$rc $((SECONDS - start))" >"$logs/$name.rc"
	} &
	besides[$name]=$!
}

skips() { # what was skipped: a line with package or file, test, feature and reason for each; not what another part did run
	local ran
	ran=$(cat "$logs"/bounds-all.log "$logs"/rails.log 2>/dev/null | sed -nE 's/^--- PASS: ([^ ]+) .*/\1/p' | sort -u)
	sort -u "$KVSPRAY_SKIPS" | while IFS=$'\t' read -r package name feature reason; do
		grep -qxF "$name" <<<"$ran" || printf '%s\t%s\t%s\t%s\n' "$package" "$name" "$feature" "$reason"
	done
	sed -nE 's/^SKIPPED ([^:]+)::(.*) - Skipped: (([a-z0-9+-]+): )?(.*)$/\1\t\2\t\4\t\5/p' "$logs"/{python,smoke,e2e,page,attack-e2e,docs,pods,sglang}.log 2>/dev/null
	sed -nE 's/^rdma: skipped: (.*)/test\/rdma\tquick.sh\trdma\t\1/p' "$logs/rdma.log" 2>/dev/null
}

told_skips() { # how many tests this machine could not run, and for each thing that it lacks how many and which
	skips >"$logs/skips" || true
	echo "skipped    $(wc -l <"$logs/skips"), with the reasons in $logs/skips"
	awk -F'\t' '{ if ($3 == "") $3 = "other"; n[$3]++; names[$3] = names[$3] " " $2 } END { for (f in n) printf "  %-14s %3d %s\n", f, n[f], names[f] }' "$logs/skips" | sort | cut -c-400
}

joined() { # NAME WHAT-THE-LAST-LINE-MATCHES
	local rc=1 seconds=0
	wait "${besides[$1]}" || true
	read -r rc seconds <"$logs/$1.rc" || true
	echo "=== $1, which ran beside:"
	cat "$logs/$1.log"
	told "$1" "$2" "$rc" "$seconds"
}

counted() { # go test, with a closing line that says how much ran
	local rc=0 out=$logs/go-raw.log
	go test -race -timeout "$go_limit" "$@" 2>&1 | tee "$out" || rc=$?
	echo "packages: $(grep -c '^ok' "$out" || true) ok, $(grep -cE '^(FAIL|panic)' "$out" || true) failing lines, $(grep -c 'no test files' "$out" || true) without tests"
	return $rc
}

attacks() { # LEAST ARGUMENTS...: counted, and at least so many attacks passed: a pattern that matches nothing also ends well
	local least=$1 rc=0 passed
	shift
	counted -v "$@" || rc=$?
	passed=$(grep -cE '^ *--- PASS: .*(attack|garbage|rewritten|LateWrites/|TestLateDMA \()' "$logs/go-raw.log" || true)
	echo "attacks: $passed passed, at least $least expected"
	((passed >= least)) || rc=1
	return $rc
}

bounds() { # the tests whose bounds the race detector would hide, without it and one package after the other; all of them have to be there
	local rc=0 out=$logs/bounds-raw.log name try left=("$@")
	: >"$logs/bounds-all.log"
	# One that says that the machine was too busy to tell is asked again; any other that did not pass has failed.
	for ((try = 0; try < 3 && ${#left[@]} > 0; try++)); do
		KVSPRAY_MUST_RUN=$KVSPRAY_MUST_RUN,kvspray,alloc,norace go test -count=1 -p 1 -v -timeout 5m -run "^($(IFS='|'; echo "${left[*]}"))\$" \
			./bench/simbench ./connector ./sidecar ./control/peer ./transport/tcp ./transport/shm ./transport/gdr ./gpu ./control/exec ./parseblock ./internal/sys/mem 2>&1 | tee "$out" || rc=$?
		cat "$out" >>"$logs/bounds-all.log"
		left=()
		for name in "$@"; do
			grep -q "^--- PASS: $name " "$logs/bounds-all.log" || left+=("$name")
		done
		((rc == 0)) && grep -q ' quiet: ' "$out" || break
	done
	for name in "${left[@]}"; do
		echo "$name did not pass"
		rc=1
	done
	echo "bounds: $(grep -c '^--- PASS' "$logs/bounds-all.log" || true) passed, $# expected"
	return $rc
}

figures() { # PATTERN: tests on rails of the kernel, without -race and with nothing beside them, because they measure
	KVSPRAY_RAILS=${KVSPRAY_RAILS:-minute} go test -count=1 -timeout 90m -v -run "$1" ./test/rails
}

# What runs beside ends with us.
trap 'for p in $(jobs -p); do pkill -P "$p" || true; kill "$p" || true; done 2>/dev/null' EXIT

go_limit=15m
py=.build/venv/bin/python
pytest=(-m pytest -q -rfEs --no-fold-skipped)
export KVSPRAY_MUST_RUN=${KVSPRAY_MUST_RUN:-vllm,shm,tcp,gcc,s3server}
unit() { # every Go test that is not long
	counted -short ./...
}

long() { # the packages with tests that `make test` leaves out as too long
	local packages
	mapfile -t packages < <(git grep -l 'testing\.Short()' -- '*_test.go' | xargs -n1 dirname | sort -u | sed 's,^,./,')
	counted "${packages[@]}"
}

beside env make env # fetches for most of its time
case $mode in
test)
	part build '^' make build wireflip s3server
	joined env 'ready'
	beside python "$py" "${pytest[@]}" pybind/tests integration/vllm/tests integration/sglang/tests test/soak
	part go '^packages' unit
	joined python 'passed|failed|error'
	part smoke 'passed|failed|error' "$py" "${pytest[@]}" test/e2e --part smoke
	;;
all)
	test/rdma/quick.sh prepare & # the part rdma waits for it
	part build '^' make build wireflip s3server
	joined env 'ready'
	part generate '^' make generate-check
	part size '^kvspray' make build-size
	part site '^site' make site
	part chart '^(ok|FAIL)' make test-chart
	part long '^packages' long
	part bounds '^bounds' bounds TestCPU TestServeCPU TestSliceDoesNotAllocate TestRunsAreCheap TestCostOfReshape TestCopyDoesNotHoldTheCollector TestLanesDoNotHoldTheCollector TestPullsDoNotHoldTheCollector \
		TestWritesDoNotHoldTheCollector TestMovesDoNotHoldTheCollector TestExecDoesNotHoldTheCollector TestPlanningDoesNotHoldTheCollector \
		TestMutants TestLaws TestPlanLaws TestDraftLaws TestHybrids TestHybridsInStages TestFingerprintIgnores TestMeshDoesNotHerd TestManyNodes TestWord \
		TestMembersAmongUnproved TestLanesAmongStrangers TestLossOfAllPeers TestIdlePeersAreNotMeasured TestOneDeadlineForAll TestIdlePeer
	part rdma '^rdma' make test-rdma-quick
	part rails '^(ok|FAIL)' figures .
	part receivers '^(ok|FAIL)' go test -count=1 -timeout 10m -run '^TestBenchReceivers$' ./cmd/kvspray-bench
	part e2e 'passed|failed|error' "$py" "${pytest[@]}" test/e2e --part rest
	part page 'passed|skipped|failed|error' make test-page
	part docs '^docs:' make test-docs
	part pods '^pods:' make test-pods
	part sglang 'passed|failed|error' make test-sglang
	;;
attack)
	export KVSPRAY_ATTACK_RUNS=${KVSPRAY_ATTACK_RUNS:-1000}
	go_limit=60m
	part build '^' make build wireflip s3server
	joined env 'ready'
	part attack-go '^attacks' attacks 21 -run 'Conformance/(Fence_attack|Source_rewritten|Late_garbage)|LateDMA' ./transport/...
	part attack-node '^attacks' attacks 4 -run '^TestLateWrites$' ./sidecar
	part attack-rails '^(ok|FAIL)' figures '^TestLateWrites$'
	part attack-preload 'passed|failed|error' env KVSPRAY_PRELOAD_SEEDS=100 KVSPRAY_PRELOAD_KILLS=100 "$py" "${pytest[@]}" pybind/tests/test_preload.py
	part attack-e2e 'passed|failed|error' "$py" "${pytest[@]}" test/e2e/test_faults.py
	;;
*)
	echo "run.sh $mode: want test, all or attack" >&2
	exit 2
	;;
esac

echo
echo "=== summary"
printf '%s\n' "${summary[@]}"
told_skips
if ((failed)); then
	echo "$target: FAILED"
	exit 1
fi
echo "$target: ok"
