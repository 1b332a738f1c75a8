package machine

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Mount mounts file systems of the kernel's own, each at a folder that it makes: the first process of a machine has
// none of them. One that is there already is left alone.
func Mount(mounts ...[2]string) error {
	for _, m := range mounts {
		kind, at := m[0], m[1]
		if err := os.MkdirAll(at, 0o755); err != nil {
			return fmt.Errorf("make a folder to mount %s: %w", kind, err)
		}
		if err := unix.Mount(kind, at, kind, 0, ""); err != nil && !errors.Is(err, unix.EBUSY) { // the kernel may have mounted devtmpfs
			return fmt.Errorf("mount %s on %s: %w", kind, at, err)
		}
	}
	return nil
}
