package vdisk

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// insideDelay is the argument of the guest's first process that has its disk delay each write, by a device mapper over
// it, and insideDelayMs is the delay.
const (
	insideDelay   = "delay"
	insideDelayMs = 100
)

// mapperRequest is struct dm_ioctl of linux/dm-ioctl.h, and the data behind it: one target and its parameters.
type mapperRequest struct {
	version                [3]uint32
	bytes, dataAt, targets uint32
	openCount              int32
	flags, event, _        uint32
	device                 uint64
	name                   [128]byte
	uuid                   [129]byte
	_                      [7]byte
	firstSector, sectors   uint64 // struct dm_target_spec from here on
	status                 int32
	next                   uint32
	target                 [16]byte
	parameters             [256]byte
}

// Numbers of linux/dm-ioctl.h: the commands, with the size of struct dm_ioctl in them.
const (
	mapperHead   = 312
	mapperCreate = 3<<30 | mapperHead<<16 | 0xfd<<8 | 3 // DM_DEV_CREATE
	mapperLoad   = mapperCreate - 3 + 9                 // DM_TABLE_LOAD
	mapperResume = mapperCreate - 3 + 6                 // DM_DEV_SUSPEND without its flag
)

// delayDisk makes /dev/dm-0, which is the disk of that name with delayed writes.
func delayDisk(name string, ms int) error {
	text, err := os.ReadFile("/sys/block/" + name + "/size")
	if err != nil {
		return err
	}
	sectors, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return err
	}
	control, err := os.OpenFile("/dev/mapper/control", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer control.Close()
	for _, command := range []uintptr{mapperCreate, mapperLoad, mapperResume} {
		r := mapperRequest{version: [3]uint32{4}, dataAt: mapperHead, sectors: sectors}
		r.bytes = uint32(unsafe.Sizeof(r))
		copy(r.name[:], "slow")
		if command == mapperLoad {
			r.targets = 1
			copy(r.target[:], "delay")
			copy(r.parameters[:], fmt.Sprintf("/dev/%s 0 0 /dev/%s 0 %d", name, name, ms))
		}
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, control.Fd(), command, uintptr(unsafe.Pointer(&r))); errno != 0 {
			return fmt.Errorf("make the disk slow, command %#x: %w", command, errno)
		}
	}
	return nil
}
