package sockets

//go:generate ../../../bpf/compile -type count -type so_limit -type so_left -type so_key -type so_own -type so_control -type so_seen sockets ../../../bpf/pod/sockets.bpf.c
