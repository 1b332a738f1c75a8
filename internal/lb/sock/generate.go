package sock

//go:generate ../../../bpf/compile -type sock_outcome -type sock_limit -type sock_choice -type sock_choices -type sock_client -type sock_stay sock ../../../bpf/lb/sock/sock.bpf.c
//go:generate ../../../bpf/compile -type addr -type sock_gone -type sock_pair -type sock_end -type sock_limit sockclose ../../../bpf/lb/sock/close.bpf.c
