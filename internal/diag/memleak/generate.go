package memleak

//go:generate ../../../bpf/compile -type leak_constant -type leak_kind -type leak_count -type leak_alloc -type leak_cache -type leak_stack memleak ../../../bpf/diag/memleak.bpf.c
