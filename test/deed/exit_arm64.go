package deed

import "debug/elf"

const exitMachine = elf.EM_AARCH64

// exitCode is exit(0): mov x0, #0; mov x8, #93; svc #0.
var exitCode = []byte{0, 0, 0x80, 0xd2, 0xa8, 0x0b, 0x80, 0xd2, 1, 0, 0, 0xd4}
