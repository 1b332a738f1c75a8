# `make help` lists the targets. Building and testing need Go and nothing else: the BPF
# objects are in the repository. A target that needs Debian packages names them, and installs
# them if it runs as root.

GO ?= go
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
DEADCODE := golang.org/x/tools/cmd/deadcode@v0.52.0

# Only a generated file may match these; `make verify-generated` compares them.
GENERATED := '*_bpfel.go' '*_bpfel.o' '*.pb.go' '*.connect.go'

# Packages whose tests compare golden files and pages, and write them with -update.
GOLDEN_PACKAGES := ./internal/guard/command ./internal/lb/command ./internal/pod/command ./internal/udp/command ./internal/control ./internal/diag/io ./internal/diag/memleak ./internal/diag/ping ./internal/diag/sched ./internal/diag/top ./internal/diag/vdisk ./internal/guard/protect ./internal/kernel ./internal/lb/datapath/abi ./internal/lb/source/file ./internal/metrics ./internal/products ./test/script ./test/kernel

# Tests wait most of their time, for timeouts and for each other's programs, in namespaces of their own.
# So more tests run side by side than there are CPUs. The longest packages begin first.
BESIDE := $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -lt 8 ] || n=8; echo -p $$((2 * n)) -parallel $$((3 * n)))
LONGEST := ./test/net ./test/load ./test/packet ./internal/lb/datapath/attach

# More for `go test`, for example TESTFLAGS='-v -run TestX'.
TESTFLAGS ?=

# Packages whose tests also run under other kernels, and these kernels; "host" is the running
# kernel. Only a complete run is recorded for the README.
KERNELS ?= 6.1,6.12,host
KERNEL_PACKAGES ?= ./test/kernel/guest,./internal/kernel,./internal/lb/datapath/abi,./internal/lb/datapath/attach,./internal/lb/datapath/store,./internal/lb/datapath/upgrade,./internal/lb/datapath,./internal/lb/decap,./internal/lb/sock,./internal/lb/realserver,./internal/udp/xsk,./internal/udp/hook,./internal/udp/lease,./internal/udp/broker,./internal/udp/daemon,./internal/udp/doctor,./internal/guard/fanotify,./internal/guard/judge,./internal/guard/gate,./internal/guard/protect,./internal/guard/connect,./internal/guard/detect,./internal/guard/demo,./internal/pod/sockets,./internal/pod/watch,./internal/pod/daemon,./internal/cgroup,./sensor,./internal/event,./internal/diag,./internal/diag/io,./internal/diag/memleak,./internal/diag/ping,./internal/diag/sched,./internal/diag/symbol,./internal/diag/top,./internal/diag/vdisk,./test/cost,./test/packet,./test/net,./test/stamps
KERNELFLAGS ?= --record
ifdef QUICK
KERNELS := 6.1
# The things that an old kernel is most likely to refuse: loading each program and feature, each way
# to attach, and a flow through the programs. In emulation, loading a program takes seconds.
KERNEL_PACKAGES := ./test/kernel/guest,./internal/lb/datapath/attach=AttachInEveryMode|AttachAtTC|AFlowThrough|FeaturesAreLoaded|FeaturesAtTC|ChainOutlives,./internal/lb/datapath/store=ContentsComeBack|JiffiesPerSecond,./internal/lb/decap,./internal/guard/protect=TestMatrix,./test/net=KernelTunnels
KERNELFLAGS := --rest
endif

FUZZTIME ?= 10m

.PHONY: help
help:
	@sed -n 's/^## //p' Makefile

## make build             builds the static binary ./shunt
.PHONY: build
build: go-version
	CGO_ENABLED=0 $(GO) build -trimpath -o shunt ./cmd/shunt

# Flags of test/rest, which leaves out a package that passed if nothing has changed that its tests can see; -all leaves out none.
RESTFLAGS ?=
REST = GO='$(GO)' $(GO) run ./test/rest $(RESTFLAGS)

## make test              all tests, except of packages that passed before and are unchanged; as root also tests that need namespaces and BPF. RESTFLAGS=-all: of all packages
.PHONY: test
# Nobody debugs the binaries of tests, and DWARF takes 40 % of the CPU time of linking one.
test: export GOFLAGS := $(GOFLAGS) -ldflags=-w
test: go-version
	@echo "make test: no Debian packages are needed"
	@[ "$$(id -u)" -eq 0 ] || echo "make test: not root, so tests that load BPF programs or make network namespaces will skip"
	$(REST) $(LONGEST) ./... -- -timeout 20m $(BESIDE) $(TESTFLAGS)
	$(REST) -C bench/draw . -- $(TESTFLAGS)
	$(REST) -C test/cel . -- $(TESTFLAGS)
	$(REST) -C kube ./cluster/bench ./cluster/meter ./cluster/upstream ./command ./daemonset ./hold ./event ./give ./place ./pool ./probe ./rival ./source ./translate -- $(TESTFLAGS)
	$(REST) -C test/kube ./node ./plane -- $(TESTFLAGS)

# The binaries of a test cluster: static, because their images have no libraries.
WITH_KUBE = control="$$(GO='$(GO)' test/kube/build)" && helm="$$(GO='$(GO)' test/kube/helm)" && programs="$$(mktemp -d)" && trap 'rm -rf "$$programs"' EXIT && \
	CGO_ENABLED=0 $(GO) build -C kube -trimpath -o "$$programs/" ./cmd/shunt-kube ./cluster/pod ./cluster/demo

## make test-services     tests Services of a real apiserver, with packets through namespaces; as root. The first run compiles Kubernetes, which takes minutes
.PHONY: test-services
test-services: go-version
	SHUNT_KUBE=build $(REST) -C kube ./net -- -timeout 10m -parallel 4 $(TESTFLAGS)

## make test-kube         tests Services of a real apiserver, with packets, and of a cluster of three nodes; as root. The first run compiles Kubernetes, which takes minutes
.PHONY: test-kube
test-kube: go-version
	.ci/packages containerd runc containernetworking-plugins
	gvisor="$$(GO='$(GO)' test/kube/gvisor)" && $(WITH_KUBE) && SHUNT_KUBE="$$control" SHUNT_KUBE_HELM="$$helm" SHUNT_KUBE_PROGRAMS="$$programs" SHUNT_KUBE_GVISOR="$$gvisor" $(GO) test -C kube -count=1 $(TESTFLAGS) ./...

## make test-kube-e2e     runs Kubernetes' own tests of Services, with kube-proxy and with shunt-kube, and writes the table in docs/reference; as root. Takes most of an hour
.PHONY: test-kube-e2e
test-kube-e2e: go-version
	.ci/packages containerd runc containernetworking-plugins nftables wget curl netcat-openbsd bind9-dnsutils
	upstream="$$(GO='$(GO)' test/kube/upstream)" && $(WITH_KUBE) ./cluster/upstream && "$$programs/upstream" --kube "$$control" --helm "$$helm" --chart deploy/helm/shunt-kube --programs "$$programs" \
		--upstream "$$upstream" --table docs/reference/kubernetes-e2e.md

## make bench-kube        measures Services with shunt-kube, and with kube-proxy in modes nftables and iptables, and writes the page in docs/reference; as root. Takes an hour; BENCHFLAGS="--services 1 --rounds 1" is the short form
.PHONY: bench-kube
bench-kube: go-version
	.ci/packages containerd runc containernetworking-plugins nftables iptables
	$(WITH_KUBE) ./cluster/bench && "$$programs/bench" --kube "$$control" --helm "$$helm" --chart deploy/helm/shunt-kube --programs "$$programs" \
		--results docs/reference/kubernetes-performance.json --page docs/reference/kubernetes-performance.md $(BENCHFLAGS)

## make demo-kube         shows a cluster of three nodes without kube-proxy, and its Services; as root. The first run compiles Kubernetes, which takes minutes
.PHONY: demo-kube
demo-kube: go-version
	@[ "$$(id -u)" -eq 0 ] || { echo "make demo-kube: namespaces and BPF need root: run it with sudo" >&2; exit 1; }
	.ci/packages containerd runc containernetworking-plugins
	@$(WITH_KUBE) && "$$programs/demo" --kube "$$control" --helm "$$helm" --chart deploy/helm/shunt-kube --programs "$$programs"

## make generate          makes BPF objects, Go bindings and the API's Go from their sources
.PHONY: generate
# The generators run side by side, unlike with `go generate ./...`. The one of test/next comes last, because it imports packages that others write.
generate: go-version
	.ci/packages clang-19 llvm-19 libbpf-dev linux-libc-dev
	grep -rl --include='*.go' --exclude-dir='.?*' '^//go:generate ' . | grep -v '^\./test/next/' | xargs -n 1 -P "$$(nproc)" $(GO) generate
	$(GO) generate ./test/next

## make verify-generated  fails if a committed file differs from the file that `make generate` makes
.PHONY: verify-generated
verify-generated: generate
	@changed="$$(git status --porcelain --untracked-files=all -- $(GENERATED))" || exit 1; \
	if [ -n "$$changed" ]; then \
		echo "make verify-generated: these files differ from the committed ones:"; \
		echo "$$changed"; \
		git --no-pager diff --stat -- $(GENERATED); \
		echo "commit them, or compare your compiler's version with bpf/toolchain"; \
		exit 1; \
	fi
	@echo "make verify-generated: all generated files are as committed"

## make golden            writes golden files and reference pages anew, from the present code
.PHONY: golden
golden: go-version
	@for package in $(GOLDEN_PACKAGES); do $(GO) test -count=1 $$package -update || exit 1; done
	git --no-pager diff --stat

## make lint              checks with gofmt, go mod tidy, go vet, staticcheck, deadcode, clang-format
.PHONY: lint
lint: lint-shunt lint-nested

.PHONY: lint-shunt
lint-shunt: go-version
	.ci/packages clang-format-19
	@unformatted="$$(gofmt -l api bench cmd internal kube packaging sensor test udp)"; \
	if [ -n "$$unformatted" ]; then echo "gofmt would change (make format):"; echo "$$unformatted"; exit 1; fi
	$(GO) mod tidy -diff
	$(GO) vet ./...
	$(GO) run $(STATICCHECK) ./...
	@dead="$$($(GO) run $(DEADCODE) -test ./...)" || exit 1; \
	if [ -n "$$dead" ]; then echo "neither a program nor a test calls these functions; remove them:"; echo "$$dead"; exit 1; fi
	find bpf bench udp -name '*.[ch]' -print0 | xargs -0 clang-format-19 --dry-run -Werror

# The nested Go modules. Compiling Kubernetes' libraries for the first time takes minutes.
.PHONY: lint-nested
lint-nested: go-version
	cd kube && $(GO) mod tidy -diff && $(GO) vet ./... && $(GO) run $(STATICCHECK) ./...
	$(GO) vet -C test/kube ./node ./plane
	for module in bench/draw test/cel; do (cd $$module && $(GO) mod tidy -diff && $(GO) vet . && $(GO) run $(STATICCHECK) .) || exit 1; done

## make format            formats with gofmt and clang-format, in place
.PHONY: format
format:
	.ci/packages clang-format-19
	gofmt -w api bench cmd internal kube packaging sensor test udp
	find bpf bench udp -name '*.[ch]' -print0 | xargs -0 clang-format-19 -i

## make test-loaded       runs all tests RUNS times (20), with two busy loops beside them
.PHONY: test-loaded
test-loaded: go-version
	.ci/loaded

## make soak              runs all tests and their long versions: random sequences, fuzzing (FUZZTIME each), SHUNT_SOAK tests
.PHONY: soak
soak: go-version
	@grep -rl --include='*_test.go' 'pgregory.net/rapid' . | xargs -r -n1 dirname | sort -u | while read -r package; do \
		echo "make soak: random sequences of $$package"; \
		$(GO) test -C $$package -count=1 -timeout 60m . -rapid.checks=20000 </dev/null || exit 1; \
	done
	@grep -rl --include='*_test.go' '"SHUNT_SOAK"' . | xargs -r -n1 dirname | sort -u | while read -r package; do \
		echo "make soak: long tests of $$package"; \
		SHUNT_SOAK=1 $(GO) test -C $$package -count=1 -timeout 90m -v . </dev/null || exit 1; \
	done
	$(GO) run ./test/kernel --kernels 6.1,6.12 --packages './internal/guard/protect=TestFamily' --args '-reloads 1000' --timeout 4h
	@$(MAKE) --no-print-directory test RESTFLAGS=-all
	@$(MAKE) --no-print-directory test-rested
	@$(MAKE) --no-print-directory fuzz

## make test-rested       runs the long tests that otherwise rest until their files change (test/unchanged), and records that they pass
.PHONY: test-rested
test-rested: go-version
	.ci/packages clang-19 libbpf-dev linux-libc-dev
	@grep -rl --include='*_test.go' 'unchanged\.Rests(' . | xargs -r -n1 dirname | sort -u | while read -r package; do \
		tests=$$(awk '/^func Test/ { sub(/^func /, ""); sub(/\(.*/, ""); name = $$0 } /unchanged\.Rests\(/ { print name }' $$package/*_test.go | paste -sd'|'); \
		echo "make test-rested: $$tests of $$package"; \
		SHUNT_RESTLESS=1 $(GO) test -count=1 -timeout 30m $(BESIDE) -run "^($$tests)\$$" $$package </dev/null || exit 1; \
	done
	SHUNT_RESTLESS=1 $(MAKE) --no-print-directory test-kernels QUICK=1
	SHUNT_RESTLESS=1 $(MAKE) --no-print-directory fuzz FUZZTIME=10000x FUZZFLAGS=-changed
	git --no-pager diff --stat -- test/unchanged

## make fuzz              runs every fuzz target for FUZZTIME; FUZZFLAGS=-changed: only targets that have not passed with the present files
.PHONY: fuzz
fuzz: go-version
	$(GO) run ./test/fuzz -time $(FUZZTIME) $(FUZZFLAGS)

## make test-kernels      runs tests under Debian's kernels (KERNELS), in virtual machines, and records them for README.md; QUICK=1: only the most important ones
.PHONY: test-kernels
test-kernels: go-version
	@status=0; \
	$(GO) run ./test/kernel --kernels $(KERNELS) --packages '$(KERNEL_PACKAGES)' $(KERNELFLAGS) || status=$$?; \
	case "$(KERNELFLAGS)" in *--record*) $(GO) test -count=1 ./test/kernel -update || status=$$? ;; esac; \
	exit $$status

## make test-systemd      tests the .deb and the unit under Debian 12's systemd 252, in a virtual machine; as root
.PHONY: test-systemd
test-systemd: go-version
	.ci/packages mmdebstrap
	$(GO) run ./packaging/release --arch amd64 --version 0.0.1 --out .tools/packages/1
	$(GO) run ./packaging/release --arch amd64 --version 0.0.2 --out .tools/packages/2
	rm -rf .tools/packages/both && mkdir .tools/packages/both && cp .tools/packages/[12]/*.deb .tools/packages/both
	$(GO) run ./test/kernel --kernels 6.1 --systemd bookworm --files .tools/packages/both --packages ./test/systemd

## make bench             compares shunt with other balancers; as root, about forty minutes (BENCHFLAGS=--quick)
.PHONY: bench
bench: go-version
	$(GO) run ./bench $(BENCHFLAGS)

## make bench-mesh        compares shunt and HAProxy on three servers behind ECMP; as root, about five minutes (MESHFLAGS=--quick)
.PHONY: bench-mesh
bench-mesh: go-version
	$(GO) run ./bench/mesh $(MESHFLAGS)

## make percall           measures nanoseconds per packet, for NAT and direct return; as root (PERCALLFLAGS='--flows 1')
.PHONY: percall
percall: go-version
	$(GO) run ./bench/percall $(PERCALLFLAGS)
	$(GO) run ./bench/percall --direct $(PERCALLFLAGS)

## make approve-weight    records the size of the programs on this kernel (test/cost); as root. OTHERS=6.1,6.12: on these kernels, too; LOSE=1: programs that a kernel now refuses may lose their figures
.PHONY: approve-weight
approve-weight: go-version
	$(GO) test -count=1 ./test/cost -run GrowsUnapproved -update $(if $(LOSE),-lose)
	@for kernel in $$(echo '$(OTHERS)' | tr , ' '); do \
		$(GO) run ./test/kernel --kernels "$$kernel" --packages './test/cost=TestNoLoadedProgramGrowsUnapproved' || echo "make approve-weight: the figures of $$kernel differ from the record, and are recorded now"; \
		$(GO) test -count=1 ./test/cost -run TestMerge -merge "$$PWD/.tools/kernels/$$kernel.log" $(if $(LOSE),-lose) || exit 1; \
	done
	git --no-pager diff -- test/cost/record.txt

## make approve-packets   records the present cost of packets, with the reason for it (test/cost): REASON='...'; as root
.PHONY: approve-packets
approve-packets: export REASON := $(REASON)
approve-packets: go-version
	@[ -n "$$REASON" ] || { echo "make approve-packets: give the reason for the present cost of packets: make approve-packets REASON='...'" >&2; exit 1; }
	$(GO) test -count=1 ./test/cost -run TestNoPacketCostsMoreUnapproved -approve "$$REASON"
	git --no-pager diff -- test/cost/packets.txt

## make release           makes tarballs and .deb for amd64 and arm64, SHA256SUMS, reproducible: dist/ (RELEASEFLAGS='--version 0.1.0')
.PHONY: release
release: go-version
	$(GO) run ./packaging/release $(RELEASEFLAGS)

## make cross             compiles and vets everything for arm64
.PHONY: cross
cross: go-version
	CGO_ENABLED=0 GOARCH=arm64 $(GO) vet -trimpath ./...
	CGO_ENABLED=0 GOARCH=arm64 $(GO) build -trimpath -o /dev/null ./cmd/shunt

## make clean             removes the binary and downloaded tools
.PHONY: clean
clean:
	rm -rf shunt .tools dist

# Go before 1.21 cannot fetch the version that go.mod asks for, and its message does not say so.
.PHONY: go-version
go-version:
	@command -v $(GO) >/dev/null || { echo "Go is not installed; see https://go.dev/dl/"; exit 1; }
	@$(GO) env GOVERSION | awk -F'[.a-z]+' '$$2 > 1 || $$3 >= 21 { ok = 1 } END { exit !ok }' || \
		{ echo "$$($(GO) version) is too old: shunt needs Go 1.21 or later, which fetches the version in go.mod; see README.md"; exit 1; }
