package connect

//go:generate ../../../bpf/compile -type connect_constant -type connect_op -type connect_address_kind -type connect_target -type connect_masks -type connect_policy -type connect_count -type connect_event -type connect_file -type connect_question -type guard_rule -type guard_file -type guard_process connect ../../../bpf/guard/connect.bpf.c
