package sched

//go:generate ../../../bpf/compile -type sched_constant -type sched_sensor -type sched_missed -type sched_run -type sched_wait -type sched_stall -type sched_cpu -type sched_task -type sched_known sched ../../../bpf/diag/sched.bpf.c
//go:generate ../../../bpf/compile -output-dir hold -go-package hold -type hold Hold ../../../bpf/diag/hold.bpf.c
