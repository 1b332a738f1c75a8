package decap

//go:generate ../../../bpf/compile -type addr -type sender_key decap ../../../bpf/lb/decap/decap.bpf.c
