package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const (
	// rootArchive, if it is there, is a Debian system whose systemd becomes the first process.
	rootArchive = "/root.tar"
	newRoot     = "/newroot"
	// serviceVariable marks this program as a service of that systemd.
	serviceVariable = "SHUNT_GUEST_SERVICE"
)

const service = `[Unit]
Description=Tests
After=basic.target

[Service]
Type=oneshot
Environment=` + serviceVariable + `=1
ExecStart=/guest
StandardOutput=file:/dev/ttyS0
StandardError=inherit
TimeoutStartSec=infinity
`

// becomeSystemd unpacks the system into a file system of its own, because the sandboxes of
// systemd cannot be made on the one that the kernel unpacks the initramfs into (pivot_root(2)),
// moves there, and becomes its init. The tests then run as a service.
func becomeSystemd() error {
	if err := os.MkdirAll(newRoot, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", newRoot, "tmpfs", 0, "size=80%,mode=0755"); err != nil {
		return fmt.Errorf("make a file system for the new root: %w", err)
	}
	for _, args := range [][]string{
		{"tar", "-xf", rootArchive, "-C", newRoot}, {"rm", rootArchive},
		{"cp", "-a", "/tests", "/tests.json", "/src", newRoot}, {"cp", "/init", newRoot + "/guest"},
		{"sh", "-c", "[ ! -d /packages ] || cp -a /packages " + newRoot},
	} {
		if out, err := exec.Command("/bin/busybox", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("busybox %v: %w: %s", args, err, out)
		}
	}
	units := newRoot + "/etc/systemd/system"
	wants := filepath.Join(units, "multi-user.target.wants")
	if err := os.MkdirAll(wants, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(units+"/guest.service", []byte(service), 0o644); err != nil {
		return err
	}
	for name, to := range map[string]string{
		wants + "/guest.service": units[len(newRoot):] + "/guest.service", units + "/default.target": "/lib/systemd/system/multi-user.target",
		units + "/serial-getty@ttyS0.service": "/dev/null", units + "/getty.target": "/dev/null", units + "/console-getty.service": "/dev/null",
	} {
		if err := os.Symlink(to, name); err != nil && !os.IsExist(err) {
			return err
		}
	}
	if err := beforeBoot(); err != nil {
		return err
	}
	if err := os.Chdir(newRoot); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move to the new root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return fmt.Errorf("become systemd: %w", unix.Exec("/lib/systemd/systemd", []string{"/lib/systemd/systemd", "--log-target=kmsg"}, []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}))
}

// beforeBoot runs the boot.sh of each package of tests that has one, in the new root. It prepares the state for the
// boot.
func beforeBoot() error {
	tests, err := listed()
	if err != nil {
		return err
	}
	for _, t := range tests {
		script := t.Dir + "/boot.sh"
		if _, err := os.Stat(newRoot + script); os.IsNotExist(err) {
			continue
		}
		c := exec.Command("/bin/busybox", "chroot", newRoot, "/bin/sh", script)
		c.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "SYSTEMD_OFFLINE=1", "DEBIAN_FRONTEND=noninteractive"}
		if out, err := c.CombinedOutput(); err != nil {
			return fmt.Errorf("run %s before systemd: %w: %s", script, err, out)
		}
	}
	return nil
}
