// Guest is the first and only program of a test machine: it mounts the file systems that tests
// need, loads /modules in order, runs the tests that /tests.json lists, reports each on the
// second serial line, and switches the machine off. See test/kernel.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/machine"
	"github.com/shunt-lb/shunt/test/kernel/suite"
)

func main() {
	if os.Getenv(serviceVariable) != "" {
		finish(runTests(append(environment, "PATH=/usr/sbin:/usr/bin:/sbin:/bin")))
	}
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "guest: this is the init of a test machine; run go run ./test/kernel instead")
		os.Exit(2)
	}
	finish(run())
}

// finish switches the machine off.
func finish(err error) {
	if err != nil {
		fmt.Println("guest:", err)
	}
	unix.Sync()
	drain(os.Stdout)
	if err := unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART); err != nil { // qemu's -no-reboot ends here
		fmt.Println("guest: restarting:", err)
	}
	select {}
}

// run prepares the machine, runs all tests and reports them.
func run() error {
	if err := prepare(); err != nil {
		return err
	}
	if _, err := os.Stat(rootArchive); err == nil {
		return becomeSystemd()
	}
	return runTests(environment)
}

// runTests runs and reports the tests of /tests.json.
func runTests(environment []string) error {
	serial, err := os.OpenFile("/dev/ttyS1", os.O_WRONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return fmt.Errorf("open the line for results: %w", err)
	}
	defer serial.Close()
	tests, err := listed()
	if err != nil {
		return err
	}
	log := openLog()
	for _, t := range tests {
		fmt.Printf("guest: %s\n", t.Package)
		r := suite.Run(context.Background(), t, environment, os.Stdout)
		r.Splats = log.splats()
		line, err := json.Marshal(r)
		if err != nil {
			return err
		}
		fmt.Fprintf(serial, "%s\n", line)
	}
	fmt.Fprintln(serial, "end")
	drain(serial)
	return nil
}

// listed reads the tests of /tests.json.
func listed() (tests []suite.Test, err error) {
	data, err := os.ReadFile("/tests.json")
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(data, &tests); err != nil {
		return nil, fmt.Errorf("/tests.json: %w", err)
	}
	return tests, nil
}

// prepare mounts file systems and loads modules.
func prepare() error {
	if err := machine.Mount([][2]string{
		{"devtmpfs", "/dev"}, {"proc", "/proc"}, {"sysfs", "/sys"}, {"tmpfs", "/tmp"}, {"tmpfs", "/run"},
		{"bpf", "/sys/fs/bpf"}, {"cgroup2", "/sys/fs/cgroup"},
		{"debugfs", "/sys/kernel/debug"}, {"tracefs", "/sys/kernel/tracing"},
	}...); err != nil {
		return err
	}
	if out, err := exec.Command("/bin/busybox", "--install", "-s", "/bin").CombinedOutput(); err != nil {
		return fmt.Errorf("install busybox: %w: %s", err, out)
	}
	if err := nameUsers(); err != nil {
		return err
	}
	// Otherwise the tunnel modules put tunl0 and ip6tnl0 into every namespace a test makes.
	if err := os.WriteFile("/proc/sys/net/core/fb_tunnels_only_for_init_net", []byte("2"), 0); err != nil {
		return fmt.Errorf("keep fallback tunnels out of namespaces: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("look up lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	modules, err := filepath.Glob("/modules/*.ko") // sorted by name, which is the order
	if err != nil {
		return err
	}
	for _, file := range modules {
		image, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		if err := unix.InitModule(image, ""); err != nil && !errors.Is(err, unix.EEXIST) {
			fmt.Printf("guest: load %s: %v\n", file, err) // a test that needs it will report more
		}
	}
	return nil
}

// nameUsers gives the guest the users and groups that every host has.
func nameUsers() error {
	if err := os.MkdirAll("/etc", 0o755); err != nil {
		return fmt.Errorf("name users: %w", err)
	}
	return errors.Join(
		os.WriteFile("/etc/passwd", []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n"), 0o644),
		os.WriteFile("/etc/group", []byte("root:x:0:\nnogroup:x:65534:\n"), 0o644))
}

// environment is the environment of every test. SHUNT_KERNEL_TEST tells a test that it runs
// here, so that things that may be missing elsewhere must be there.
var environment = []string{"PATH=/bin:/sbin:/usr/bin", "HOME=/tmp", "TMPDIR=/tmp", "SHUNT_KERNEL_TEST=1", "GOTRACEBACK=all"}

// kernelLog reads the kernel's messages as they come.
type kernelLog struct{ fd int }

// openLog skips the kernel's earlier messages.
func openLog() kernelLog {
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		fmt.Println("guest: read the kernel's log:", err)
		return kernelLog{fd: -1}
	}
	if _, err := unix.Seek(fd, 0, unix.SEEK_END); err != nil {
		fmt.Println("guest: skip the kernel's earlier log:", err)
	}
	return kernelLog{fd: fd}
}

// splatMarks begin the kernel's complaints about itself. Lines such as "Packet memory" do not
// count.
var splatMarks = []string{"BUG:", "WARNING:", "Oops:", "general protection fault", "INFO: task", "rcu: INFO:"}

// splats counts complaints since the last call and prints them.
func (l kernelLog) splats() int {
	count := 0
	record := make([]byte, 8192) // one read is one record, at most this long (printk's CONSOLE_EXT_LOG_MAX)
	for l.fd >= 0 {
		n, err := unix.Read(l.fd, record)
		if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.EINTR) {
			continue // records were overwritten: the next read goes on behind them
		}
		if err != nil || n <= 0 {
			break
		}
		_, text, _ := bytes.Cut(record[:n], []byte(";"))
		for _, mark := range splatMarks {
			if strings.HasPrefix(string(text), mark) {
				fmt.Printf("guest: the kernel complains: %s", text)
				count++
			}
		}
	}
	return count
}

// drain waits until the serial line has sent everything (TCSBRK with argument 1).
func drain(f *os.File) {
	if err := unix.IoctlSetInt(int(f.Fd()), unix.TCSBRK, 1); err != nil {
		fmt.Println("guest: draining", f.Name()+":", err)
	}
}
