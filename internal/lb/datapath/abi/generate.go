package abi

// bpf2go begins each name with the name of the object, and each constant with its enum. Here the package says
// the first, and C the second.

//go:generate ../../../../bpf/compile -type constant -type address_flag -type forwarding -type tracking -type draining -type slot_state -type slot_flag -type feature -type to_client -type service_flag -type remembered_flag -type flow_state -type direction -type ring -type timeout -type name_kind -type chain_position -type switch_word -type switch_state -type gate -type addr -type address -type frontend_key -type frontend -type range_key -type service -type backend -type interface -type flow_key -type flow -type tracked -type remembered -type settings -type traffic -type sweep -type recall -type check -type member -type strays -type clock -type name_key -type name -type filter_key -type filter -type service_flows -type vlan_tag -type vlan_tags -type vlan_key abi ../../../../bpf/lb/abi.bpf.c
//go:generate sed -E -i -e s/\babiMapSh([A-Z])/Map\1/g -e s/\babi[A-Z][A-Za-z]*[a-z]([A-Z][A-Z0-9]*_[A-Z0-9_]+)\b/\1/g -e s/\babi([A-Z])/\1/g abi_bpfel.go
//go:generate gofmt -w abi_bpfel.go
//go:generate ../../../../bpf/compile xdp ../../../../bpf/lb/xdp.bpf.c
//go:generate ../../../../bpf/compile tc ../../../../bpf/lb/tc.bpf.c
//go:generate ../../../../bpf/compile deliver ../../../../bpf/lb/deliver.bpf.c
//go:generate ../../../../bpf/compile -type sourceless sweep ../../../../bpf/lb/sweep.bpf.c
//go:generate ../../../../bpf/compile stopgap ../../../../bpf/lb/stopgap.bpf.c
//go:generate ../../../../bpf/compile drops ../../../../bpf/lb/drops.bpf.c
//go:generate ../../../../bpf/compile gate ../../../../bpf/lb/gate.bpf.c
//go:generate ../../../../bpf/compile check ../../../../bpf/lb/check.bpf.c
//go:generate ../../../../bpf/compile vlan ../../../../bpf/lb/vlan.bpf.c
//go:generate ../../../../bpf/compile tunnelled ../../../../bpf/lb/tunnelled.bpf.c
