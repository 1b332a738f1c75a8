package event

// The flags are those of internal/kernel/generate.go. abi has no programs: it is the header's types.

//go:generate -command bpf2go env BPF2GO_CC=clang-19 BPF2GO_STRIP=llvm-strip-19 "BPF2GO_CFLAGS=-O2 -g -Wall -Wextra -Wno-unused-parameter -Werror -mcpu=v3 -I/usr/include/x86_64-linux-gnu" go run github.com/cilium/ebpf/cmd/bpf2go -target bpfel
//go:generate bpf2go -no-global-types -type event_header -type event_constant abi ../../bpf/event/event.bpf.c
//go:generate bpf2go -output-dir storm -go-package storm -no-global-types Storm ../../bpf/event/storm.bpf.c
