package hook

// The object and its bindings are committed; internal/kernel/generate.go says how, and has the flags.

//go:generate -command bpf2go env BPF2GO_CC=clang-19 BPF2GO_STRIP=llvm-strip-19 "BPF2GO_CFLAGS=-O2 -g -Wall -Wextra -Wno-unused-parameter -Werror -mcpu=v3 -I/usr/include/x86_64-linux-gnu" go run github.com/cilium/ebpf/cmd/bpf2go -target bpfel
//go:generate bpf2go -no-global-types -type addr -type lease_limit -type lease_key -type lease -type lease_count -type lease_pass udp ../../../bpf/udp/udp.bpf.c
