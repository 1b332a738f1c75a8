package ping

//go:generate ../../../bpf/compile -type ping_constant -type ping_point -type probe_constant -type probe_head -type ping_row -type ping_place -type ping_trail -type ping_thread ping ../../../bpf/diag/ping.bpf.c
