package hook

//go:generate ../../../bpf/compile -type addr -type lease_limit -type lease_key -type lease -type lease_direct -type lease_count -type lease_pass udp ../../../bpf/udp/udp.bpf.c
