package protect

//go:generate ../../../bpf/compile -type guard_constant -type guard_op -type guard_file -type guard_process -type guard_side -type guard_trust -type guard_given -type guard_state -type guard_masks -type guard_count -type guard_event -type guard_agent -type guard_rule -type guard_key -type guard_narrow -type guard_renews guard ../../../bpf/guard/guard.bpf.c
