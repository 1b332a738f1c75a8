package main

import (
	"errors"
	"os"
	"runtime"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// inNamespace runs the test in a network namespace of its own, and ends it with the thread.
func inNamespace(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes a network namespace and attaches XDP in it")
	}
	runtime.LockOSThread() // never unlocked: the thread is thrown away with its namespace
	ns, err := netns.New()
	if err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	t.Cleanup(func() { ns.Close() })
}

// TestGuestMounts shows that the guest has the mounts that tests rely on.
func TestGuestMounts(t *testing.T) {
	if os.Getenv("SHUNT_KERNEL_TEST") == "" {
		t.Skip("checks the guest of test/kernel, and runs only there")
	}
	for _, file := range []string{
		"/proc/self/status", "/sys/kernel/btf/vmlinux", "/sys/fs/cgroup/cgroup.controllers",
		"/sys/kernel/tracing/events/xdp/xdp_bulk_tx/id", "/dev/null", "/tmp", "/run", "main_test.go",
		"/sys/module/8021q", "/sys/module/bonding", "/sys/module/dummy",
		"/sys/module/ipip", "/sys/module/sit", "/sys/module/ip6_tunnel", "/sys/module/tunnel4", "/sys/module/tunnel6",
		"/sys/module/fou", "/sys/module/fou6", "/sys/module/udp_tunnel", "/sys/module/ip6_udp_tunnel",
	} {
		if _, err := os.Stat(file); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// TestXDPNativeOnVeth shows that a program loads, runs, attaches natively to a veth and
// is pinned: the least that every other test of the data plane needs.
func TestXDPNativeOnVeth(t *testing.T) {
	inNamespace(t)
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "sh_proof", Type: ebpf.XDP, License: "GPL",
		Flags:        1 << 5, // BPF_F_XDP_HAS_FRAGS, linux/bpf.h
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()},
	})
	if err != nil {
		t.Fatalf("load a program of two instructions: %v", err)
	}
	defer prog.Close()
	const xdpPass = 2
	if got, _, err := prog.Test(make([]byte, 64)); err != nil || got != xdpPass {
		t.Fatalf("run it: returned %d, %v; want %d", got, err, xdpPass)
	}
	pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a"}, PeerName: "b"}
	if err := netlink.LinkAdd(pair); err != nil {
		t.Fatalf("make a veth pair: %v", err)
	}
	a, err := netlink.LinkByName("a")
	if err != nil {
		t.Fatal(err)
	}
	l, err := link.AttachXDP(link.XDPOptions{Program: prog, Interface: a.Attrs().Index, Flags: link.XDPDriverMode})
	if err != nil {
		t.Fatalf("attach in native mode: %v", err)
	}
	defer l.Close()
	_, err = link.AttachXDP(link.XDPOptions{Program: prog, Interface: a.Attrs().Index, Flags: link.XDPDriverMode})
	if err == nil || !errors.Is(err, unix.EBUSY) {
		t.Errorf("attach a second time: %v; want EBUSY", err)
	}
}
