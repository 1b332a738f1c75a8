package kernel

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"
)

// DefaultPinRoot is the usual mount point of bpffs.
const DefaultPinRoot = "/sys/fs/bpf"

var instanceName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$`)

// CheckName refuses names of instances that are unfit for bpffs or a path.
func CheckName(name string) error {
	if !instanceName.MatchString(name) {
		return fmt.Errorf("the instance name %q cannot name a directory of bpffs: use 1 to 63 letters, digits, - and _, beginning with a letter or digit", name)
	}
	return nil
}

// Home is the folder of all pins of shunt.
func Home(root string) string { return filepath.Join(root, "shunt") }

// Directory returns the folder of an instance's pins, or of a product of which a machine has only one. The
// name of such a product begins with _, as no instance's does.
func Directory(root, instance string) string { return filepath.Join(Home(root), instance) }

// Lock keeps other processes from changing attachments until unlock: the daemon and `shunt chain` use it. The
// kernel releases the lock with the process.
func Lock(root, instance string) (unlock func(), err error) {
	return lock(Directory(root, instance), unix.LOCK_EX)
}

// TryLock locks a folder of bpffs, or fails with EWOULDBLOCK if another process has locked it. The kernel
// releases the lock with the process.
func TryLock(folder string) (unlock func(), err error) {
	return lock(folder, unix.LOCK_EX|unix.LOCK_NB)
}

func lock(folder string, how int) (unlock func(), err error) {
	f, err := os.Open(folder)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", folder, err)
	}
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		err = unix.Flock(int(f.Fd()), how)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", folder, err), f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// LinkPrefix begins the name of the pin of a link that attaches a balancer to an interface.
const LinkPrefix = "link-"

// ToPin makes the name of an interface one that bpffs takes, and FromPin makes it one again. bpffs
// reserves dots (bpf_lookup in kernel/bpf/inode.c), which names of VLAN interfaces have; so a dot is
// %2e in the name of a pin. No interface has a percent sign in its name (dev_get_valid_name in
// net/core/dev.c).
func ToPin(iface string) string { return strings.ReplaceAll(iface, ".", "%2e") }

// FromPin is the inverse of ToPin.
func FromPin(pin string) string { return strings.ReplaceAll(pin, "%2e", ".") }
