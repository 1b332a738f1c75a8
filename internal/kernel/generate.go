package kernel

//go:generate ../../bpf/compile -type reason -type count -type addr -type verdict -type probe_constant -type stamp_constant -type probe_head -type stamp core ../../bpf/core/core.bpf.c
