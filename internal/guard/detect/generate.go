package detect

//go:generate ../../../bpf/compile -type detect_constant -type detect_type -type detect_kind -type detect_direction -type detect_fd -type detect_parent -type detect_cred -type detect_event -type detect_shed -type detect_name -type detect_filter -type guard_file detect ../../../bpf/guard/detect.bpf.c
