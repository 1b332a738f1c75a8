package event

// abi has no programs: it is the header's types.

//go:generate ../../bpf/compile -type event_header -type event_constant abi ../../bpf/event/event.bpf.c
//go:generate ../../bpf/compile -output-dir storm -go-package storm Storm ../../bpf/event/storm.bpf.c
