package shortcut

//go:generate ../../../bpf/compile -type addr -type pod_limit -type pod -type count -type pod_left -type pod_mode -type pod_counts -type pod_flow -type pod_far_key -type pod_far -type pod_steer_key -type pod_steer -type pod_hop -type pod_pin pod ../../../bpf/pod/pod.bpf.c
