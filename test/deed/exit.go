package deed

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
)

// exitProgram is an executable that ends at once: its cost is only that of starting a program, without a language's
// runtime.
func exitProgram() []byte {
	const base, headers = 0x400000, 64 + 56 // elf(5): the file's header, and one of a segment
	size := uint64(headers + len(exitCode))
	var b bytes.Buffer
	for _, part := range []any{
		elf.Header64{Ident: [elf.EI_NIDENT]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)}, Type: uint16(elf.ET_EXEC), Machine: uint16(exitMachine),
			Version: uint32(elf.EV_CURRENT), Entry: base + headers, Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1},
		elf.Prog64{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_X), Vaddr: base, Paddr: base, Filesz: size, Memsz: size, Align: 0x1000},
		exitCode,
	} {
		_ = binary.Write(&b, binary.LittleEndian, part) // a buffer takes all, and these have fixed sizes
	}
	return b.Bytes()
}
