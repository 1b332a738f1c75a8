package kernel

//go:generate ../../bpf/compile -type reason -type count core ../../bpf/core/core.bpf.c
