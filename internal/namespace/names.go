package namespace

import (
	"errors"
	"fmt"
	"os"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Names is the folder in which iproute2 looks for namespaces that have a name (ip-netns(8)).
const Names = "/run/netns"

// PrepareNames makes the folder of names ready for one more, as `ip netns add` does: a mount of its
// own that other mount namespaces share. Without it, the first `ip netns add` since the machine was
// started would put its mount on top of namespaces that are bound there already, and nobody could
// remove these.
func PrepareNames() error {
	if err := prepare(Names); err != nil {
		return fmt.Errorf("prepare %s for the name of a network namespace: %w", Names, err)
	}
	return nil
}

// NewNamed is netns.NewNamed in a folder that is prepared: it moves the calling thread there.
func NewNamed(name string) (netns.NsHandle, error) {
	if err := PrepareNames(); err != nil {
		return netns.None(), err
	}
	return netns.NewNamed(name)
}

func prepare(folder string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	held, err := os.Open(folder)
	if err != nil {
		return err
	}
	defer held.Close()
	if err := unix.Flock(int(held.Fd()), unix.LOCK_EX); err != nil { // or two would bind it twice
		return err
	}
	shared := unix.Mount("", folder, "", unix.MS_SHARED|unix.MS_REC, "")
	if !errors.Is(shared, unix.EINVAL) { // EINVAL: it is no mount
		return shared
	}
	if err := unix.Mount(folder, folder, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return err
	}
	return unix.Mount("", folder, "", unix.MS_SHARED|unix.MS_REC, "")
}
