package kernel

// The objects and bindings are committed, so that building shunt needs no compiler.
// `make generate` makes them again for all packages, byte for byte the same with clang 19 and the
// headers of Debian's libbpf-dev and linux-libc-dev.
//
// The flags stand here once. Callbacks of kernel helpers have parameters they do not use,
// hence -Wno-unused-parameter.

//go:generate -command bpf2go env BPF2GO_CC=clang-19 BPF2GO_STRIP=llvm-strip-19 "BPF2GO_CFLAGS=-O2 -g -Wall -Wextra -Wno-unused-parameter -Werror -mcpu=v3 -I/usr/include/x86_64-linux-gnu" go run github.com/cilium/ebpf/cmd/bpf2go -target bpfel
//go:generate bpf2go -no-global-types -type reason -type count core ../../bpf/core.bpf.c
//go:generate bpf2go -output-dir ../datapath -go-package datapath -no-global-types -type constant -type address_flag -type forwarding -type tracking -type draining -type slot_state -type slot_flag -type feature -type to_client -type service_flag -type remembered_flag -type flow_state -type direction -type ring -type timeout -type name_kind -type chain_position -type switch_word -type switch_state -type gate -type addr -type address -type frontend_key -type frontend -type range_key -type service -type backend -type interface -type flow_key -type flow -type tracked -type remembered -type settings -type traffic -type sweep -type recall -type check -type member -type strays -type clock -type name_key -type name -type filter_key -type filter -type service_flows -type vlan_tag -type vlan_tags -type vlan_key abi ../../bpf/abi.bpf.c
//go:generate bpf2go -output-dir ../datapath -go-package datapath -no-global-types xdp ../../bpf/xdp.bpf.c
//go:generate bpf2go -output-dir ../datapath -go-package datapath -no-global-types tc ../../bpf/tc.bpf.c
//go:generate bpf2go -output-dir ../datapath -go-package datapath -no-global-types sweep ../../bpf/sweep.bpf.c
//go:generate bpf2go -output-dir ../datapath -go-package datapath -no-global-types guard ../../bpf/guard.bpf.c
//go:generate bpf2go -output-dir ../datapath -go-package datapath -no-global-types drops ../../bpf/drops.bpf.c
//go:generate bpf2go -output-dir ../datapath -go-package datapath -no-global-types gate ../../bpf/gate.bpf.c
//go:generate bpf2go -output-dir ../datapath -go-package datapath -no-global-types check ../../bpf/check.bpf.c
//go:generate bpf2go -output-dir ../datapath -go-package datapath -no-global-types vlan ../../bpf/vlan.bpf.c
//go:generate bpf2go -output-dir ../datapath -go-package datapath -no-global-types -type laps stopwatch ../../bpf/stopwatch.bpf.c
//go:generate bpf2go -output-dir ../decap -go-package decap -no-global-types -type addr -type sender_key decap ../../bpf/decap.bpf.c
