package deed

import "debug/elf"

const exitMachine = elf.EM_X86_64

// exitCode is exit(0): xor edi, edi; mov eax, 60; syscall.
var exitCode = []byte{0x31, 0xff, 0xb8, 0x3c, 0, 0, 0, 0x0f, 0x05}
