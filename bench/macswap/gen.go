package macswap

//go:generate go run github.com/cilium/ebpf/cmd/bpf2go -cc clang-19 -strip llvm-strip-19 -target bpfel -no-global-types -cflags "-O2 -g -Wall -Wextra -Werror -Wno-unused-parameter -I/usr/include/x86_64-linux-gnu" macswap ../bpf/macswap.bpf.c
