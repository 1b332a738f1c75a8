package sock

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// rawConnect is connect(2) with an address that package unix has no type for.
func rawConnect(fd int, to *unix.RawSockaddr) error {
	if _, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(to)), unix.SizeofSockaddrInet4); errno != 0 {
		return errno
	}
	return nil
}
