package vdisk

//go:generate ../../../bpf/compile -type vdisk_constant -type vdisk_kind -type vdisk_op -type vdisk_hand -type vdisk_event -type vdisk_file -type vdisk_call vdisk ../../../bpf/diag/vdisk.bpf.c
