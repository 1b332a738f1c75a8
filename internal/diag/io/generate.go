package io

//go:generate ../../../bpf/compile -type io_constant -type io_missed -type io_file -type io_key -type io_count -type io_bytes -type io_path -type io_disk io ../../../bpf/diag/io.bpf.c
