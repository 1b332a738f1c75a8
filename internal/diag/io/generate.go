package io

// The flags are those of internal/kernel/generate.go.

//go:generate -command bpf2go env BPF2GO_CC=clang-19 BPF2GO_STRIP=llvm-strip-19 "BPF2GO_CFLAGS=-O2 -g -Wall -Wextra -Wno-unused-parameter -Werror -mcpu=v3 -I/usr/include/x86_64-linux-gnu" go run github.com/cilium/ebpf/cmd/bpf2go -target bpfel
//go:generate bpf2go -no-global-types -type io_constant -type io_missed -type io_file -type io_key -type io_count -type io_bytes -type io_path -type io_disk io ../../../bpf/diag/io.bpf.c
