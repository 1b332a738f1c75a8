package kernel

//go:generate ../../bpf/compile -type reason -type count -type addr -type stamp_constant -type stamp core ../../bpf/core/core.bpf.c
