# The targets install their tools and environments in .build and bin. The machine must have Go,
# CPython 3.11 to 3.13 with venv, gcc with binutils, and make.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

ROOT := $(CURDIR)
B := $(ROOT)/.build
TOOLS := $(B)/bin
VENV := $(B)/venv
LINTENV := $(B)/lint-venv
SITEENV := $(B)/site-venv
# PYTHON names the interpreter for new environments. If it is empty, test/rig/env.py finds one.
PYTHON ?=
HOSTPY := $(if $(PYTHON),$(PYTHON),python3)
# Without this check, an older Python fails with only SyntaxError, and a missing one with Error 127.
# The lowest permitted version is 3.$(1).
need-python = @"$(HOSTPY)" -c 'import sys; sys.exit(sys.version_info < (3, $(1)))' 2>/dev/null || { \
  echo "make $@: $(HOSTPY) is no Python of version 3.$(1) or newer: install one, or name it, for instance make $@ PYTHON=python3.12" >&2; exit 1; }
need-go = @command -v go >/dev/null || { echo "make $@: go is not on the PATH: install Go 1.26 or newer" >&2; exit 1; }
VERSION := $(shell git describe --tags --always --dirty 2>/dev/null || echo devel)
LDFLAGS := -X github.com/kvspray/kvspray/internal/version.version=$(VERSION)
export KVSPRAY_BINARY := $(ROOT)/bin/kvspray
# All targets use -trimpath: a package that is built with and without it is compiled twice.
export GOFLAGS := $(strip $(filter-out -trimpath,$(shell go env GOFLAGS 2>/dev/null)) -trimpath)

##@ Use

# make help lists the targets with ##. make help-all lists those with #:, too.
list = awk 'BEGIN {FS = ":.*$(1) "} /^\#\#@/ {title = substr($$0, 5)} /^[a-z0-9-]+:.*$(1) / {if (title) {printf "\n%s\n", title; title = ""} printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
.PHONY: help help-all
help: ## Show this list; make help-all shows all targets
	@$(call list,\#\#)

help-all:
	@$(call list,\#[\#:])

.PHONY: build
build: ## Build bin/kvspray and bin/kvspray-bench
	$(need-go)
	@mkdir -p bin
	go build -ldflags '$(LDFLAGS)' -o bin/ ./cmd/kvspray
	cd lab && go build -ldflags '$(LDFLAGS)' -o ../bin/ ./cmd/kvspray-bench

SIZE_LIMIT := 45000000
.PHONY: build-size
build-size: #: Build the static kvspray of the images, without symbols; fail if it is larger than 45 MB
	@mkdir -p $(B)/size
	CGO_ENABLED=0 go build -ldflags '$(LDFLAGS) -s -w' -o $(B)/size/ ./cmd/kvspray
	@size=$$(stat -c %s $(B)/size/kvspray); echo "kvspray: $$size bytes of at most $(SIZE_LIMIT)"; \
	[ $$size -le $(SIZE_LIMIT) ] || { echo "make $@: too large: go version -m and go tool nm -size -sort size show what it links" >&2; exit 1; }

.PHONY: wireflip
wireflip:
	@mkdir -p $(TOOLS)
	go build -o $(TOOLS)/ ./test/wireflip

# NIXL's back end: C++, so that it is no part of build.
NIXL := $(B)/nixl
NIXL_C := $(wildcard pybind/src/*.c)
.PHONY: nixl
nixl: $(NIXL)/libplugin_KVSPRAY.so ## Build NIXL's back end KVSPRAY into .build/nixl (docs/nixl.md; needs g++)

$(NIXL)/libplugin_KVSPRAY.so: $(wildcard integration/nixl/src/*) $(NIXL_C) $(wildcard pybind/src/*.h pybind/include/kvspray/*.h)
	@command -v g++ >/dev/null || { echo "make nixl: g++ is not on the PATH: install g++ 10 or newer" >&2; exit 1; }
	@rm -rf $(NIXL)/obj; mkdir -p $(NIXL)/obj
	cd $(NIXL)/obj && gcc -std=c11 -O2 -g -fPIC -fvisibility=hidden -D_GNU_SOURCE -pthread -I$(ROOT)/pybind/include -c $(addprefix $(ROOT)/,$(NIXL_C))
	g++ -std=c++20 -O2 -g -fPIC -Wall -Wextra -Werror -Wno-missing-field-initializers -fvisibility=hidden -pthread -DKVS_RELEASE='"$(VERSION)"' \
	  -Ipybind/include -Ipybind/src -shared -Wl,-z,defs -Wl,--version-script=integration/nixl/src/plugin.map -o $@ integration/nixl/src/plugin.cc $(NIXL)/obj/*.o -ldl

DISTENV := $(B)/dist-venv
DIST := deploy/dist.py --version $(VERSION)
.PHONY: wheels
wheels: $(DISTENV)/.stamp ## Build the Python wheels for this machine into dist/; one of them contains the sidecar
	$(need-go)
	$(call need-python,10)
	@$(HOSTPY) $(DIST) wheels

.PHONY: image
image: $(TOOLS)/.deploy-stamp ## Build an image with the sidecar into dist/, as an OCI layout, without a daemon or a registry
	$(need-go)
	$(call need-python,10)
	@$(HOSTPY) $(DIST) image

.PHONY: dist
dist: $(DISTENV)/.stamp $(TOOLS)/.deploy-stamp #: Build all packages for x86-64 and arm64 into dist/VERSION: wheels, archives, deb, rpm, image
	$(need-go)
	$(call need-python,10)
	@$(HOSTPY) $(DIST) all
	@ls -l dist/$(VERSION)

.PHONY: test-dist
test-dist: dist #: Install each package of make dist into an empty root, and move blocks between two sidecars there (root)
	unshare --mount $(HOSTPY) deploy/test_dist.py --version $(VERSION) dist/$(VERSION)

# The second build has another directory and no cache of the compiler.
AGAIN := $(B)/again
.PHONY: release-check
release-check: #: make test-dist, what the package index checks, and a second build that has to give the same bytes (root)
	@[[ $(VERSION) != *-dirty ]] || { echo "make $@: commit or remove your changes: the second build is of the commit" >&2; exit 1; }
	@$(MAKE) test-dist
	$(DISTENV)/bin/twine check --strict dist/$(VERSION)/*.whl
	rm -rf $(AGAIN)
	git clone -q --shared . $(AGAIN)
	mkdir -p $(AGAIN)/.build/dist
	ln -s $(TOOLS) $(DISTENV) $(AGAIN)/.build/
	ln -s $(B)/dist/debs $(AGAIN)/.build/dist/
	GOCACHE=$(AGAIN)/cache $(HOSTPY) $(AGAIN)/$(DIST) all
	diff -r dist/$(VERSION) $(AGAIN)/dist/$(VERSION)
	@echo "make $@: two builds gave the same $$(find dist/$(VERSION) -type f | wc -l) files"; rm -rf $(AGAIN)

.PHONY: release-notes
release-notes: #: Print the part of CHANGELOG.md for the version that this commit is tagged with
	@awk -v want='$(VERSION:v%=%),' '/^## / {on = $$2 == want && !/not released/} on {print; n++} END {exit !n}' CHANGELOG.md || { \
	  echo "make $@: CHANGELOG.md has no part \"## $(VERSION:v%=%), DATE\"" >&2; exit 1; }

.PHONY: demo
demo: ## Real vLLM, prefill and decode, two sidecars: tokens equal? (FLIP=1: damage a bit on the wire; TRANSPORT=tcp|shm)
	$(call need-python,8)
	$(MAKE) -s build wireflip
	$(HOSTPY) test/rig/env.py
	$(VENV)/bin/python test/rig/demo.py

.PHONY: demo-store
demo-store: build env ## Conversations on real vLLM move between nodes with stores, one of which restarts: tokens equal? hits and times (NODES, TALKS, TURNS, REDIS=host:port)
	$(VENV)/bin/python test/rig/demo_store.py

.PHONY: demo-sglang
demo-sglang: build ## SGLang's prefill and decode servers and its router, HiCache on a store, two sidecars: tokens equal? (an environment of 2.7 GB, made once)
	$(call need-python,8)
	$(HOSTPY) test/rig/env.py --sglang
	$(B)/venv-sglang/bin/python test/sglang/demo.py

.PHONY: demo-cross
demo-cross: build #: vLLM prefills for SGLang, and SGLang for vLLM: tokens and pages equal? (makes both environments once)
	$(call need-python,8)
	$(HOSTPY) test/rig/env.py
	$(HOSTPY) test/rig/env.py --sglang
	$(B)/venv-sglang/bin/python test/sglang/demo_cross.py

.PHONY: demo-gpu
demo-gpu: #: make demo with CUDA engines, on a host with a GPU and the files of make gpu-bin
	test/gpu/engines/demo.sh

##@ Check

# Each test run writes a report to $(B)/test. make test-report makes one page of all reports.
XML := $(B)/test
gotest = @mkdir -p $(XML); cd ./$(2) && $(TOOLS)/gotestsum --format pkgname --junitfile $(XML)/$(1).xml --
pytest = @mkdir -p $(XML); $(2) -m pytest -q -rfEs --no-fold-skipped --junitxml $(XML)/$(1).xml
# The features whose tests must not skip.
export KVSPRAY_MUST_RUN ?= vllm,shm,tcp,gcc,s3server,release

# With -k, make continues with the other targets after one has failed.
.PHONY: test
test: ## Required for each change: Go with -race, Python, real engines with one fault of each kind
	@$(MAKE) -k -j2 -Oline build wireflip s3server gotestsum env
	@rc=0; $(MAKE) -k -j2 -Oline test-go test-py || rc=1; $(MAKE) test-smoke || rc=1; exit $$rc

.PHONY: test-all
test-all: ## All other tests that need no special hardware or privilege: more cases, RDMA guests, engines, pods, SGLang (90 minutes)
	@$(MAKE) -k generate-check build-size site test-chart test-long test-rdma-quick test-engines test-page test-sglang test-nixl test-docs test-pods test-skew

.PHONY: test-nightly
test-nightly: ## Hours of tests: measurements, attacks, laws, truth, schedules, mutants, fuzzing, soaks; .build/test/report.html
	@rc=0; $(MAKE) -k test-measure test-rails test-attack test-sim test-mutants test-laws test-truth test-drafts test-conformance test-pods-group test-mesh test-routers \
	  soak-sglang soak-store soak-fleet test-fuzz bench || rc=1; $(MAKE) test-pods PODS_STEPS=all || rc=1; $(MAKE) soak SOAK=2h || rc=1; \
	$(MAKE) test-report || rc=1; exit $$rc

.PHONY: watch
watch: $(TOOLS)/gotestsum ## Test a Go package each time you save one of its files
	$(TOOLS)/gotestsum --watch --watch-chdir --format testname -- -short

# These packages have no goroutines, so the race detector finds nothing in them. Their tests run
# for minutes, and ten times as long with the detector.
PURE := ./parseblock ./test/arch ./test/sim
RACED = $(or $(PKG),$(filter-out $(patsubst ./%,github.com/kvspray/kvspray/%,$(PURE)),$(shell go list ./...)))
.PHONY: test-go
test-go: build s3server $(TOOLS)/gotestsum #: Go tests with -race, without measurements; PKG: packages (all)
	$(if $(PKG),,$(call gotest,pure) -short -timeout 15m -skip '^TestMeasure' $(PURE))
	$(call gotest,go) -race -short -timeout 15m -skip '^TestMeasure' $(RACED)
	$(if $(PKG),,$(call gotest,simbench,lab) -short -timeout 15m -skip '^TestMeasure' ./simbench)
	$(if $(PKG),,$(call gotest,lab,lab) -race -short -timeout 15m -skip '^TestMeasure' $$(go list ./... | grep -v /simbench$$))

.PHONY: test-py
test-py: build s3server env #: Python tests, without those with engines; the last release's sidecars and stores beside ours
	$(call pytest,python,$(VENV)/bin/python) pybind/tests integration/vllm/tests integration/sglang/tests lab/soak lab/conformance test/matrix test/skew

.PHONY: test-smoke test-engines
test-smoke: build wireflip env #: Real engines, one fault of each kind
	$(call pytest,smoke,$(VENV)/bin/python) test/e2e --part smoke

test-engines: build wireflip s3server env #: Real engines: all tests that test-smoke does not run
	$(call pytest,engines,$(VENV)/bin/python) test/e2e --part rest

# The packages whose tests run fewer cases with -short.
LONG = ./transport/... $(addprefix ./,$(shell git grep -l 'testing[.]Short()' -- '*_test.go' ':!transport' | xargs -rn1 dirname | sort -u))
.PHONY: test-long
test-long: build s3server $(TOOLS)/gotestsum #: All pairs of layouts over each transport, more schedules and orders
	$(call gotest,long) -race -timeout 30m -skip '^TestMeasure' $(LONG)
	$(call gotest,mesh) -timeout 30m -run Mesh ./transport/gdr

.PHONY: test-measure
test-measure: build env $(TOOLS)/gotestsum #: The tests that measure time, CPU and memory, one after the other on an idle machine
	$(call gotest,measure) -count=1 -p 1 -v -timeout 30m -run '^TestMeasure' ./...
	$(call gotest,measure-lab,lab) -count=1 -p 1 -v -timeout 30m -run '^TestMeasure' ./...
	$(call pytest,measure-engines,$(VENV)/bin/python) test/e2e/test_events.py -k all_that_vllm_keeps

test-measure: export KVSPRAY_MEASURE = 1
# A machine that is too busy to measure fails.
test-measure: export KVSPRAY_MUST_RUN := $(KVSPRAY_MUST_RUN),kvspray,quiet

.PHONY: test-rails
test-rails: build $(TOOLS)/gotestsum #: Performance goals of transfers over several rails, on an idle machine, in minutes (root)
	$(call gotest,rails,lab) -count=1 -v -timeout 90m ./rails

test-rails: export KVSPRAY_RAILS = minute

.PHONY: test-attack
test-attack: build wireflip env $(TOOLS)/gotestsum #: The late-write attacks and fault tests in full
	$(call gotest,attack) -race -timeout 60m -run 'Conformance/(Fence_attack|Source_rewritten|Late_garbage)|LateDMA|^TestLateWrites$$' ./transport/... ./sidecar
	@for least in 'transport.*(attack|garbage|rewritten|LateDMA) 21' 'sidecar.*LateWrites/ 4'; do \
	  set -- $$least; passed=$$(grep -cE "<testcase .*$$1.*></testcase>" $(XML)/attack.xml || true); \
	  [ $$passed -ge $$2 ] || { echo "make $@: $$passed attacks of $$1 passed, at least $$2 have to" >&2; exit 1; }; done
	cd lab && KVSPRAY_RAILS=minute go test -count=1 -timeout 90m -v -run '^TestLateWrites$$' ./rails
	$(call pytest,attack-preload,KVSPRAY_PRELOAD_SEEDS=100 KVSPRAY_PRELOAD_KILLS=100 $(VENV)/bin/python) pybind/tests/test_preload.py
	$(call pytest,attack-engines,$(VENV)/bin/python) test/e2e/test_faults.py

test-attack: export KVSPRAY_ATTACK_RUNS ?= 1000

.PHONY: test-report
test-report: $(LINTENV)/.stamp #: Make one page of all test runs since make clean: .build/test/report.html
	rm -f $(XML)/all.xml
	$(LINTENV)/bin/junit2html --merge $(XML)/all.xml $(XML)/*.xml && $(LINTENV)/bin/junit2html $(XML)/all.xml $(XML)/report.html

.PHONY: test-rails-long
test-rails-long: build #: All goals of test-rails, on real sockets: hours on a machine that does nothing else (root)
	cd lab && KVSPRAY_RAILS=long go test -timeout 6h -count=1 -v ./rails

SOAK ?= 10m
.PHONY: soak
soak: build env #: Real engines under load for SOAK (10m) while sidecars, rails and engines fail every 20 s; .build/soak/report.html
	@mkdir -p $(TOOLS)
	cd lab && go build -o $(TOOLS)/ ./soak
	$(VENV)/bin/python lab/soak/soak.py --for $(SOAK)

SOAK_STORE ?= 1h
.PHONY: soak-store
soak-store: #: A store for SOAK_STORE (1h) while its process is killed and disk and bucket fail: every page compared
	KVSPRAY_STORE_SOAK=$(SOAK_STORE) go test -timeout 24h -count=1 -v ./store -run '^TestSoak$$' | grep -v '^=== '

SOAK_FLEET ?= 20m
.PHONY: soak-fleet
soak-fleet: #: Sidecars, routers and fake engines come, go and are killed, then GPUs and links fail, for SOAK_FLEET (20m) each: no errors, and how soon do routers notice?
	KVSPRAY_FLEET_SOAK=$(SOAK_FLEET) go test -timeout 24h -count=1 -v ./test/fleet | grep -v '^=== '

SOAK_SGLANG ?= 60
.PHONY: soak-sglang
soak-sglang: build #: SGLang's servers with HiCache and prefill/decode for SOAK_SGLANG minutes (60), a quarter of the requests cancelled: is anything left?
	$(call need-python,8)
	$(HOSTPY) test/rig/env.py --sglang
	$(B)/venv-sglang/bin/python test/sglang/soak.py --minutes $(SOAK_SGLANG)

.PHONY: test-laws
test-laws: #: The laws of parseblock with 100,000 random cases each, and 4 GiB of one prompt for one rank (nightly)
	go test -timeout 90m -v ./parseblock -run 'Laws|Hybrids|Ignores' -rapid.checks=100000 | grep -v '^=== '
	KVSPRAY_LARGE=1 go test -count=1 -v ./sidecar -run '^TestMoreThan4GiB$$' | grep -v '^=== '

.PHONY: test-truth
test-truth: build env #: vLLM's own tensors, moved and read back, and engines of every kind of recurrent state (nightly)
	KVSPRAY_TRUTH=1 KVSPRAY_MUST_RUN=vllm $(VENV)/bin/python -m pytest -q test/e2e/test_truth.py test/e2e/test_truth_layouts.py test/e2e/test_recurrent.py

CONNECTORS ?= kvspray
.PHONY: test-conformance
test-conformance: build env #: Wrong answers of vLLM engines with CONNECTORS (lab/conformance/connectors) under faults, beside a plain engine's (nightly)
	@mkdir -p $(XML)
	@rc=0; for c in $(CONNECTORS); do $(VENV)/bin/python lab/conformance/run.py lab/conformance/connectors/$$c.json --out $(XML)/conformance-$$c.json || rc=1; done; exit $$rc

DRAFTS ?= draft_model ngram eagle eagle3 mtp
.PHONY: test-drafts
test-drafts: build env #: Drafts at decode, with their logits, beside a plain engine's: 200 prompts for each method of DRAFTS, each at most 20 minutes (nightly)
	@rc=0; for method in $(DRAFTS); do \
	  KVSPRAY_DRAFTS_PROMPTS=$${KVSPRAY_DRAFTS_PROMPTS:-200} KVSPRAY_MUST_RUN=vllm timeout 20m \
	    $(VENV)/bin/python -m pytest -q -rP "test/e2e/test_speculation.py::test_many_prompts[$$method]" || rc=1; \
	done; exit $$rc

.PHONY: test-placement
test-placement: build env #: The holder's sidecar is killed 100 times while requests are placed there, and the holder five times: answers equal?
	KVSPRAY_HOLDER_KILLS=$${KVSPRAY_HOLDER_KILLS:-100} KVSPRAY_MUST_RUN=vllm $(VENV)/bin/python -m pytest -q -rP test/e2e/test_placement.py

# Each fuzz target runs for FUZZTIME. Parsers of bytes from lanes and sockets run for
# FUZZTIME_FOREIGN.
FUZZTIME ?= 5m
FUZZTIME_FOREIGN ?= 1h
FUZZ_FOREIGN := internal/wire cluster/gossip connector/msg control/peer/frame transport/shm transport/gdr store/directory/embedded control/exec parseblock sidecar/internal/exchange sidecar/internal/removals proxy/internal/kvevents proxy/internal/zmtp
.PHONY: test-fuzz
test-fuzz: #: Every fuzz target for FUZZTIME (5m each), parsers of lanes and sockets for FUZZTIME_FOREIGN (1h)
	@rc=0; for dir in $$(git ls-files '*_test.go' | xargs grep -l '^func Fuzz' | xargs -n1 dirname | sort -u); do \
	  case " $(FUZZ_FOREIGN) " in *" $$dir "*) time=$(FUZZTIME_FOREIGN);; *) time=$(FUZZTIME);; esac; \
	  case $$dir in lab/*) mod=lab;; *) mod=.;; esac; \
	  for name in $$(grep -ho '^func Fuzz[A-Za-z0-9]*' $$dir/*_test.go | cut -d' ' -f2); do \
	    echo "== $$dir $$name, $$time"; \
	    (cd $$mod && go test ./$${dir#lab/} -run '^$$' -fuzz "^$$name\$$" -fuzztime $$time) || rc=1; done; done; exit $$rc

.PHONY: test-sim
test-sim: #: 10,000 random fault schedules, a million slices between 1,000 nodes, the late-write attacks 1,000 times
	KVSPRAY_SIM_RUNS=$${KVSPRAY_SIM_RUNS:-10000} go test -timeout 60m -v ./test/sim | grep -v '^=== '

.PHONY: test-mutants
test-mutants: #: Change the production code, one line at a time: a test must detect each change
	go run ./test/sim/mutants

.PHONY: test-mesh
test-mesh: #: 200 sidecars as separate processes on loopback, ten restarts a second for five minutes (8 GiB of memory, 4 cores)
	KVSPRAY_MESH=$${KVSPRAY_MESH:-200} KVSPRAY_MESH_SECONDS=$${KVSPRAY_MESH_SECONDS:-300} KVSPRAY_MESH_RATE=$${KVSPRAY_MESH_RATE:-10} \
	  nice go test -count=1 -timeout 90m -v -run '^TestMeshOfProcesses$$' ./sidecar | grep -v '^=== '

RDMA := $(B)/rdma
export RDMA_DIR := $(RDMA)
$(RDMA)/initrd.cpio: $(wildcard test/rdma/guest/*) test/rdma/initramfs.sh test/rdma/fetch.sh
	test/rdma/fetch.sh $(RDMA)
	test/rdma/initramfs.sh $(RDMA)

.PHONY: rdma-guest
rdma-guest: $(RDMA)/initrd.cpio
	test/rdma/abi.sh $(RDMA)

.PHONY: test-rdma
test-rdma: rdma-guest #: Real verbs over soft-RoCE in a QEMU guest: contract suite, attacks, 512 MiB over 4 rails with faults, doctor --rdma
	go test -count=1 -race -timeout 30m -exec $(ROOT)/test/rdma/exec.sh ./internal/sys/verbs
	RAILS=2 GUEST_MEM=2560 go test -count=1 -race -v -timeout 30m -run Device -exec $(ROOT)/test/rdma/exec.sh ./transport/gdr
	GUEST_MEM=2560 go test -count=1 -v -timeout 30m -run TestRDMAFaults -exec $(ROOT)/test/rdma/exec.sh ./sidecar
	RAILS=3 go test -count=1 -v -timeout 30m -run TestDevice -exec $(ROOT)/test/rdma/exec.sh ./internal/ui/rdmacheck

.PHONY: test-rdma-quick
test-rdma-quick: #: A part of test-rdma, about a minute: contract suite, a late write and each fault on real queue pairs; if it cannot run, it prints the reason
	@test/rdma/quick.sh

.PHONY: test-rdma-two
test-rdma-two: rdma-guest #: The tests of test-rdma between two guests, as between two hosts
	go test -race -c -o $(RDMA)/gdr.race.test ./transport/gdr
	RAILS=1 GUEST_MEM=2048 test/rdma/two.sh $(RDMA)/gdr.race.test -test.v -test.timeout 30m -test.run TestDeviceConformanceTwo
	go test -c -o $(RDMA)/rdmacheck.test ./internal/ui/rdmacheck
	RAILS=1 test/rdma/two.sh $(RDMA)/rdmacheck.test -test.v -test.timeout 30m -test.run TestTwoHosts
	go test -c -o $(RDMA)/sidecar.test ./sidecar
	RAILS=4 test/rdma/two.sh $(RDMA)/sidecar.test -test.v -test.timeout 30m -test.run TestRDMATwoHosts
	KVSPRAY_RDMA_LAYERS=8 RAILS=4 test/rdma/two.sh $(RDMA)/sidecar.test -test.v -test.timeout 30m -test.run TestRDMAKilled
	KVSPRAY_RDMA_LAYERS=8 RAILS=4 test/rdma/two.sh $(RDMA)/sidecar.test -test.v -test.timeout 30m -test.run TestRDMAHostLost

.PHONY: bench-rdma
bench-rdma: rdma-guest #: gdr beside ib_write_bw in one guest, in turns: ratios, not speeds; KVSPRAY_RDMA_GOAL=0.90 fails below it
	RAILS=4 GUEST_MEM=2560 GUEST_TIMEOUT=3000 KVSPRAY_BENCH_RDMA=$${KVSPRAY_BENCH_RDMA:-10} go test -count=1 -v -timeout 50m -run TestDeviceBandwidth -exec $(ROOT)/test/rdma/exec.sh ./transport/gdr

.PHONY: test-chart
test-chart: #: The Helm chart, rendered and checked against the Kubernetes API; alert rules and dashboard
	cd deploy && go test -count=1 ./...

.PHONY: test-page
test-page: build #: The pages of sidecar and router in Chromium, during transfers; a rail fails (KVSPRAY_SHOTS: a directory for screenshots)
	$(call need-python,8)
	$(HOSTPY) test/rig/env.py --page
	$(B)/venv-page/bin/python -m pytest -q -rfEs --no-fold-skipped test/page

.PHONY: test-docs
test-docs: build env $(DISTENV)/.stamp #: Run the shell blocks of the getting-started pages, as a reader would
	$(VENV)/bin/python test/docs/blocks.py

PODS_STEPS ?=
.PHONY: test-pods test-pods-group
test-pods: build env $(TOOLS)/chartrender #: The chart's pods, run here without Kubernetes: updates, kills and drains under load (8 minutes; PODS_STEPS=all)
	$(VENV)/bin/python test/pods/pods.py $(if $(PODS_STEPS),--steps $(PODS_STEPS))

test-pods-group: build env $(TOOLS)/chartrender #: test-pods for decode engines of two pods each, as a LeaderWorkerSet: blocks reach all pods, an update, a worker's eviction
	$(VENV)/bin/python test/pods/pods.py --values test/pods/group.yaml --steps decode,worker

.PHONY: test-skew
test-skew: build env #: A rolling update of sidecars, engines and routers from the last release to this tree, and back, under load (7 minutes)
	$(VENV)/bin/python test/skew/rolling.py

.PHONY: test-sglang
test-sglang: build #: SGLang's pools, HiCache on the page store, prefill and decode on its servers and beside vLLM's (environments of 2.7 and 3 GB, made once)
	$(call need-python,8)
	$(HOSTPY) test/rig/env.py
	$(HOSTPY) test/rig/env.py --sglang
	KVSPRAY_MUST_RUN=sglang $(B)/venv-sglang/bin/python -m pytest -q -rfEs --no-fold-skipped test/sglang

.PHONY: test-nixl
test-nixl: build nixl #: NIXL's agents with the back end KVSPRAY, and vLLM's NixlConnector on it (an environment of 3 GB, made once)
	$(call need-python,8)
	$(HOSTPY) test/rig/env.py --nixl
	KVSPRAY_MUST_RUN=nixl,g++ $(B)/venv-nixl/bin/python -m pytest -q -rfEs --no-fold-skipped integration/nixl/tests

# Each cell has an environment of 3 GB, which is removed after the run.
CELLS ?=
.PHONY: test-next test-matrix
test-next: env #: Changes in the newest vLLM and SGLang to what our plug-ins use; fails if something is gone (VLLM=, SGLANG=: another release)
	$(VENV)/bin/python test/matrix/compare.py $(if $(VLLM),--vllm $(VLLM)) $(if $(SGLANG),--sglang $(SGLANG))

test-matrix: wheels env #: A pair of servers from our wheels for each release of vLLM and SGLang, and each Python; writes docs/compatibility.md (an hour; CELLS='vllm-0.32 py3.13')
	$(VENV)/bin/python test/matrix/matrix.py $(CELLS)

.PHONY: test-routers
test-routers: build env #: Other routers in front of two vLLM engines: equal tokens and pages, P is killed (downloads 1 GB once; 5 minutes)
	$(call pytest,routers,$(VENV)/bin/python) test/routers

.PHONY: lint lint-go lint-golangci lint-tools lint-docs lint-arm64 lint-ci
lint: lint-go lint-py lint-docs lint-ci ## All linters

lint-go: lint-golangci lint-tools lint-arm64

lint-golangci: $(TOOLS)/.stamp
	$(TOOLS)/golangci-lint run ./...
	cd lab && $(TOOLS)/golangci-lint run ./...

lint-tools:
	cd tools && go vet ./...
	cd deploy && go vet ./...

# The build without cgo. build-size checks the same for x86-64.
lint-arm64:
	CGO_ENABLED=0 GOARCH=arm64 go build ./...
	cd lab && CGO_ENABLED=0 GOARCH=arm64 go build ./...

lint-ci: $(TOOLS)/.stamp #: The workflows in .github
	$(TOOLS)/actionlint -shellcheck= -pyflakes=

DOCS := $(wildcard *.md docs/*.md docs/*/*.md pybind/*.md integration/*/*.md)
DOCS := $(filter-out docs/config.md,$(DOCS))
# vale checks words and sentences, the Go test checks width, links and paths. docs/config.md is
# generated.
lint-docs: $(TOOLS)/.stamp #: Words, sentences, width and links of the documents
	$(TOOLS)/vale --config tools/vale/vale.ini $(DOCS)
	go test -count=1 -run Document ./test/arch

.PHONY: site
site: $(SITEENV)/.stamp ## Build the site of the documents into .build/site, and check its links
	$(SITEENV)/bin/mkdocs build --strict -f tools/site/mkdocs.yml
	@echo "site: $$(find $(B)/site -name '*.html' | wc -l) pages, begin with $(B)/site/index.html"

.PHONY: lint-py
PYTHON := pybind integration test lab deploy tools internal
lint-py: $(LINTENV)/.stamp
	$(LINTENV)/bin/ruff check --config tools/ruff.toml $(PYTHON)
	$(LINTENV)/bin/ruff format --check --quiet --config tools/ruff.toml $(PYTHON)
	$(LINTENV)/bin/mypy --config-file tools/mypy.ini pybind/python/kvspray
	$(LINTENV)/bin/mypy --config-file tools/mypy.ini integration/vllm/src/kvspray_vllm
	$(LINTENV)/bin/mypy --config-file tools/mypy.ini integration/sglang/src/kvspray_sglang

.PHONY: generate
generate: $(TOOLS)/.stamp $(LINTENV)/.stamp ## Regenerate all generated code, kernels and documents
	$(TOOLS)/protogen -root . -plugins $(TOOLS) api/peer/v1/peer.proto
	go generate ./internal/board/... ./internal/metrics ./api/engine/...
	$(LINTENV)/bin/python internal/sys/cuda/kernels/generate.py
	go run ./cmd/kvspray config print --docs > docs/config.md.new && mv docs/config.md.new docs/config.md
	$(LINTENV)/bin/python test/matrix/matrix.py --page

GENERATED := api/peer/v1/*.pb.go internal/board/zz_generated*.go connector/msg/zz_generated*.go pybind/python/kvspray/_messages.py internal/sys/cuda/kernels/kernels.ptx internal/sys/cuda/kernels/kernels.sm_*.cubin \
  pybind/src/flag_ptx.h docs/config.md docs/compatibility.md deploy/monitoring/alerts.yaml deploy/monitoring/dashboard.json
.PHONY: generate-check
generate-check: #: Fail if generated files differ from their sources
	@before=$$(sha256sum $(GENERATED)); $(MAKE) -s generate; after=$$(sha256sum $(GENERATED)); \
	if [ "$$before" != "$$after" ]; then echo "generated files were stale; commit what 'make generate' made:"; \
	diff <(echo "$$before") <(echo "$$after") || exit 1; fi

.PHONY: budget
budget: #: Write the numbers of test/arch/budget.txt; a rise needs a reason in its line
	go test -count=1 -run '^TestBudget$$' ./test/arch -update

##@ Measure

bin/kvspray-memcpy: lab/baseline/memcpy.c
	@mkdir -p bin
	gcc -std=gnu11 -O2 -Wall -Wextra -Werror -pthread -o $@ $<

.PHONY: bench-copy
bench-copy: build bin/kvspray-memcpy #: kvspray-bench copy, both transports and integrity levels; JSON in .build/bench
	@mkdir -p $(B)/bench
	for t in tcp shm; do for i in off crc32c aead; do for c in 1 4; do \
	  [ $$t = shm ] && [ $$i != off ] && continue; \
	  echo "== $$t, integrity $$i, $$c connections"; \
	  bin/kvspray-bench copy --transport $$t --integrity $$i --conns $$c --json | tee $(B)/bench/copy-$$t-$$i-$$c.json; done; done; done

.PHONY: bench-sim-check
bench-sim-check: build #: Compare real rails (root) with a simulation of the same run; fail if the results differ by more than 7%
	@mkdir -p $(B)/bench
	for f in "" "--fault 3s:rail0:down --fault 5s:rail0:up" "--fault 3s:rail0:drop --fault 5s:rail0:heal" "--fault 3s:rail0:rate=1/20 --fault 5s:rail0:heal" \
	  "--fault 3s:rail0:ackdrop --fault 5s:rail0:heal" "--fault 3s:rail0:flap=300ms --fault 5s:rail0:heal" "--fault 3s:rail0:blackhole --fault 5s:rail0:heal"; do \
	  bin/kvspray-bench rails --duration 8s $$f --json $(B)/bench/rails.json && bin/kvspray-bench sim --against $(B)/bench/rails.json || exit 1; done

# Raw results are not in the tree. Attach this archive to the release whose figures are in
# docs/bench.
.PHONY: bench-archive
bench-archive: #: Pack the raw results of .build/bench into one archive in dist/, for a release
	@[ -n "$$(find $(B)/bench -type f 2>/dev/null | head -n 1)" ] || { \
	  echo "make $@: $(B)/bench is empty: run the benchmarks first (make bench-copy, bench-rails, bench-peers)" >&2; exit 1; }
	@mkdir -p dist
	tar --create --gzip --sort=name --owner=0 --group=0 --numeric-owner --directory $(B) \
	  --transform 's,^bench,kvspray-bench-$(VERSION),' --file dist/kvspray-bench-$(VERSION).tar.gz bench
	@ls -l dist/kvspray-bench-$(VERSION).tar.gz

BENCH_COUNT ?= 6
.PHONY: bench
bench: #: Go benchmarks (ParseBlock, frames, rings ...), compared with those of the last run by benchstat
	@mkdir -p $(B)/bench
	for module in . lab; do (cd $$module && go test -run '^$$' -bench . -benchmem -count $(BENCH_COUNT) ./...); done | tee $(B)/bench/go.new
	@[ ! -e $(B)/bench/go.txt ] || (cd tools && go tool benchstat $(B)/bench/go.txt $(B)/bench/go.new)
	@mv $(B)/bench/go.new $(B)/bench/go.txt

.PHONY: bench-rails
bench-rails: build #: kvspray-bench rails: a rail fails and returns; JSON and HTML in .build/bench (root)
	@mkdir -p $(B)/bench
	bin/kvspray-bench rails --duration 8s --fault 2s:rail0:down --fault 5s:rail0:up --json $(B)/bench/rails.json --html $(B)/bench/rails.html

.PHONY: bench-peers
bench-peers: build $(B)/venv-peers/.stamp #: The same blocks, rails and faults with NIXL and Mooncake (root; 450 MB to fetch, once)
	bin/kvspray-bench peers --python $(B)/venv-peers/bin/python --out $(B)/bench/peers $(BENCH_ARGS)

.PHONY: bench-nixl
bench-nixl: build nixl #: NIXL's back ends KVSPRAY and UCX in turns, the same ranges (an environment of 3 GB, made once)
	$(HOSTPY) test/rig/env.py --nixl
	$(B)/venv-nixl/bin/python integration/nixl/tests/bench.py $(BENCH_ARGS)

.PHONY: bench-store
bench-store: build env $(B)/venv-peers/.stamp #: Gets and puts of pages beside Mooncake's store (450 MB to fetch, once; libibverbs1)
	@mkdir -p $(B)/bench
	PYTHONPATH=$$($(VENV)/bin/python -c 'import kvspray, pathlib; print(pathlib.Path(kvspray.__file__).parents[1])') \
	  $(B)/venv-peers/bin/python lab/peers/store.py --json $(B)/bench/store-peers.json $(BENCH_ARGS)

$(B)/venv-peers/.stamp: lab/peers/requirements.txt
	@echo "making the environment of the other engines ..."
	"$$(cd test/rig && $(HOSTPY) -c 'import env; print(env.find_python())')" -m venv --clear $(B)/venv-peers
	$(B)/venv-peers/bin/python -m pip install -q --disable-pip-version-check --no-deps -r $<
	@touch $@

.PHONY: bench-latency
bench-latency: build env #: Latency of one 4 KiB block between two sidecars, from one engine's request to the other's completion
	$(VENV)/bin/python -m kvspray.latency --kvspray bin/kvspray

.PHONY: bench-place
bench-place: build env #: The router's policies with three real engines, rails of 0.1 to 10 Gbit/s: predictions, times to the first token (root, an hour)
	$(VENV)/bin/python test/rig/bench_place.py $(BENCH_ARGS)

.PHONY: bench-loads
bench-loads: build env #: Does the router choose rightly between loading from a store and computing? 12 cells with real engines, rails of 0.02 to 1 Gbit/s (root)
	$(VENV)/bin/python test/rig/bench_loads.py $(BENCH_ARGS)

.PHONY: bench-router
bench-router: build env #: kvspray proxy beside vllm-router and sglang-router, 2,000 streams of engines that compute nothing (160 MB to fetch, once; 6 minutes)
	for r in vllm-router==0.1.17 sglang-router==0.3.2; do d=$(B)/routers/$${r%%==*}; [ -e $$d/complete ] || \
	  { $(VENV)/bin/uv pip install -q --only-binary :all: --python $(VENV)/bin/python --target $$d $$r && touch $$d/complete; }; done
	@mkdir -p $(B)/bench
	bin/kvspray-bench route --json $(B)/bench/router.json $(BENCH_ARGS)

.PHONY: bench-serve
bench-serve: #: vllm bench serve through plain engines, kvspray and NIXL, on a host with a GPU and the files of make gpu-bin and gpu-nixl
	test/gpu/engines/bench_serve.sh $(BENCH_ARGS)

.PHONY: gpu-bin
gpu-bin: build env #: Pack the requirements of test/gpu into .build/gpu; copy it with the sources to a host with GPUs and no network
	@mkdir -p $(B)/gpu
	go build -ldflags '$(LDFLAGS) -s -w' -o $(B)/gpu/ ./cmd/kvspray
	cd lab && go build -ldflags '$(LDFLAGS) -s -w' -o $(B)/gpu/ ./cmd/kvspray-bench
	rm -rf $(B)/gpu/py && mkdir -p $(B)/gpu/py && cp -r $$($(VENV)/bin/python -c 'import kvspray, pathlib; print(pathlib.Path(kvspray.__file__).parent)') $(B)/gpu/py/
	@$(MAKE) gpu-engines
	@du -sh $(B)/gpu/kvspray $(B)/gpu/kvspray-bench $(B)/gpu/py $(B)/gpu/pk

.PHONY: gpu-engines
gpu-engines: env #: Pack a CUDA vLLM and kvspray for a host with GPUs and no network: .build/gpu/pk (1 GB to fetch, 10 minutes, once)
	KVSPRAY_LDFLAGS='$(LDFLAGS)' nice $(HOSTPY) test/gpu/engines/pack.py

.PHONY: gpu-own
gpu-own: env #: Make only that pack of gpu-engines that has kvspray, in seconds
	KVSPRAY_LDFLAGS='$(LDFLAGS)' nice $(HOSTPY) test/gpu/engines/pack.py --fast own

.PHONY: gpu-nixl
gpu-nixl: #: Pack NIXL for the same host, for comparisons: .build/gpu/pk-more
	nice $(HOSTPY) test/gpu/engines/pack.py nixl

.PHONY: gpu-stores
gpu-stores: #: Pack LMCache, PegaFlow and Mooncake for the same host: .build/gpu/pk-more
	nice $(HOSTPY) test/gpu/engines/pack.py peers-a peers-b peers-c

.PHONY: bench-vllm
bench-vllm: build env #: Latency of the decode engine with kvspray and with NIXL, same engines and prompts
	$(HOSTPY) test/rig/env.py --nixl
	$(VENV)/bin/python test/rig/bench_vllm.py $(BENCH_ARGS)

.PHONY: bench-sglang
bench-sglang: build $(B)/venv-peers/.stamp #: SGLang's HiCache and prefill/decode with kvspray beside file, Mooncake and NIXL (environments of 2.7 GB and 450 MB, once)
	$(call need-python,8)
	$(HOSTPY) test/rig/env.py --sglang
	@mkdir -p $(B)/bench
	for part in hicache pd; do $(B)/venv-sglang/bin/python test/rig/bench_sglang.py $$part $(BENCH_ARGS) || exit 1; done
	$(B)/venv-sglang/bin/python test/sglang/bench_backend.py --json $(B)/bench/sglang-backend.json

##@ Set-up

.PHONY: env
env: #: Make the environment with the pinned vLLM (1.4 GB to fetch, once)
	$(call need-python,8)
	@$(HOSTPY) test/rig/env.py

.PHONY: clean
clean: ## Remove all build results and environments
	rm -rf $(B) bin dist run

$(TOOLS)/gotestsum: tools/go.mod tools/go.sum
	@mkdir -p $(TOOLS)
	cd tools && go build -o $@ gotest.tools/gotestsum

.PHONY: gotestsum
gotestsum: $(TOOLS)/gotestsum

$(TOOLS)/.stamp: tools/go.mod tools/go.sum $(wildcard tools/protogen/*.go)
	@mkdir -p $(TOOLS)
	@echo "building pinned linters and generators ..."
	cd tools && go build -o $(TOOLS)/ ./protogen google.golang.org/protobuf/cmd/protoc-gen-go \
	  google.golang.org/grpc/cmd/protoc-gen-go-grpc \
	  github.com/golangci/golangci-lint/v2/cmd/golangci-lint github.com/vale-cli/vale/v3/cmd/vale \
	  github.com/rhysd/actionlint/cmd/actionlint
	@touch $@

# The tools that make packages and images, from the Go module deploy.
$(TOOLS)/.deploy-stamp: deploy/go.mod deploy/go.sum $(wildcard deploy/ociimage/*.go)
	@mkdir -p $(TOOLS)
	@echo "building the tools of packages and images ..."
	cd deploy && go build -o $(TOOLS)/ ./ociimage github.com/goreleaser/nfpm/v2/cmd/nfpm \
	  github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod github.com/google/go-licenses/v2
	@touch $@

$(TOOLS)/chartrender: deploy/go.mod deploy/go.sum $(wildcard deploy/chartrender/*.go deploy/charttest/*.go)
	@mkdir -p $(TOOLS)
	cd deploy && go build -o $@ ./chartrender

$(DISTENV)/.stamp: deploy/requirements.txt
	@echo "making the environment that builds wheels ..."
	$(HOSTPY) -m venv --clear $(DISTENV)
	$(DISTENV)/bin/python -m pip install -q --disable-pip-version-check -r $<
	@touch $@

# The S3 server of the tests. It has a target of its own, because its first build takes minutes.
$(TOOLS)/versitygw: tools/go.mod tools/go.sum
	@mkdir -p $(TOOLS)
	@echo "building the S3 server of tests ..."
	cd tools && go build -o $@ github.com/versity/versitygw/cmd/versitygw

.PHONY: s3server
s3server: $(TOOLS)/versitygw #: Build the S3 server that tests of store/object start

$(SITEENV)/.stamp: tools/site/requirements.txt
	@echo "making the Python environment of the site ..."
	$(HOSTPY) -m venv --clear $(SITEENV)
	$(SITEENV)/bin/python -m pip install -q --disable-pip-version-check -r tools/site/requirements.txt
	@touch $@

$(LINTENV)/.stamp: tools/lint-requirements.txt
	@echo "making the linters' Python environment ..."
	$(HOSTPY) -m venv --clear $(LINTENV)
	$(LINTENV)/bin/python -m pip install -q --disable-pip-version-check -r tools/lint-requirements.txt
	@touch $@
