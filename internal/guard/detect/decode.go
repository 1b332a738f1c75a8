package detect

import (
	"bytes"
	"fmt"
	"net/netip"
	"strings"
	"unsafe"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/rule"
)

var typeWords = map[detectDetectType]string{
	detectDetectTypeDETECT_EXEC: rule.Exec, detectDetectTypeDETECT_CONNECT: rule.Connect, detectDetectTypeDETECT_ACCEPT: rule.Accept, detectDetectTypeDETECT_DUP: rule.Dup,
	detectDetectTypeDETECT_OPEN: rule.Open, detectDetectTypeDETECT_SETUID: rule.SetUID, detectDetectTypeDETECT_MODULE: rule.Module, detectDetectTypeDETECT_BPF: rule.BPF,
	detectDetectTypeDETECT_PTRACE: rule.Ptrace, detectDetectTypeDETECT_MOUNT: rule.Mount, detectDetectTypeDETECT_MEMFD: rule.MemFD,
}

var kindWords = map[detectDetectKind]string{
	detectDetectKindDETECT_CLOSED: rule.Closed, detectDetectKindDETECT_FILE: rule.Plain, detectDetectKindDETECT_DEVICE: rule.Device, detectDetectKindDETECT_PIPE: rule.Pipe,
	detectDetectKindDETECT_INET: rule.Inet, detectDetectKindDETECT_UNIX: rule.Unix, detectDetectKindDETECT_SOCKET: rule.Socket, detectDetectKindDETECT_OTHER: rule.Other,
}

var directionWords = map[detectDetectDirection]string{detectDetectDirectionDETECT_OUT: rule.Out, detectDetectDirectionDETECT_IN: rule.In}

// requests of ptrace(2), by their numbers in linux/ptrace.h; the last one is process_vm_writev(2)'s.
var requests = map[uint32]string{4: "poke", 5: "poke", 13: "poke", 16: "attach", 0x4205: "poke", 0x4206: "seize", 0xffffffff: "write"}

// decode reads a program's event. Its error says that the program is of another version.
func decode(e event.Event) (*rule.Event, error) {
	var raw detectDetectEvent
	if copy(unsafe.Slice((*byte)(unsafe.Pointer(&raw)), unsafe.Sizeof(raw)), e.Payload) != int(unsafe.Sizeof(raw)) {
		return nil, fmt.Errorf("decode an event: %d bytes, and it has %d; the programs are of another version of shunt", len(e.Payload), unsafe.Sizeof(raw))
	}
	word, known := typeWords[detectDetectType(raw.Type)]
	if !known {
		return nil, fmt.Errorf("decode an event: its type is %d; the programs are of another version of shunt", raw.Type)
	}
	d := &rule.Event{Time: event.Time(e.TimeNs), Type: word, Deleted: raw.ProgramLinks == 0, User: userOf(raw.Cred), CgroupID: e.CgroupID, Netns: e.Netns, Mntns: e.Mntns,
		Write: raw.IsWrite != 0, Mode: raw.Mode, FD: raw.Fd, Target: raw.Target, ParentOuts: raw.ParentOuts, Ancestors: []rule.Process{},
		Process: rule.Process{PID: e.Tgid, StartNs: e.TaskStartNs, Comm: event.Text(raw.Comm[:]), Executable: fileOf(raw.Program)}}
	if raw.Program.Inode != 0 {
		d.Process.Program = event.Path(raw.ProgramNames[:min(int(raw.ProgramSize), len(raw.ProgramNames))])
	} else {
		d.Deleted = false // a thread of the kernel
	}
	d.Process.Args = argsOf(raw.Args[:min(int(raw.ArgsSize), len(raw.Args))])
	for _, p := range raw.Parents {
		if p.Tgid == 0 {
			break
		}
		d.Ancestors = append(d.Ancestors, rule.Process{PID: p.Tgid, StartNs: p.StartNs, Comm: event.Text(p.Comm[:]), Executable: fileOf(p.Program)})
	}
	for i, fd := range raw.Fds {
		d.FDs[i] = descriptorOf(fd)
	}
	object := raw.Object[:min(int(raw.ObjectSize), len(raw.Object))]
	switch word {
	case rule.Open, rule.MemFD:
		file := fileOf(raw.File)
		d.Path, d.File = event.Path(object), &file
	case rule.Exec, rule.Mount, rule.Module:
		d.Path = event.Text(object)
	case rule.Connect, rule.Accept:
		socket := descriptorOf(raw.Socket)
		d.Socket = &socket
	case rule.SetUID:
		before := userOf(raw.Before)
		d.Before = &before
	case rule.Ptrace:
		d.Request = requests[raw.Number]
	}
	return d, nil
}

func userOf(c detectDetectCred) rule.User { return rule.User{UID: c.Uid, EUID: c.Euid} }

func fileOf(f detectGuardFile) rule.File {
	return rule.File{Inode: f.Inode, Device: f.Device, Generation: f.Generation}
}

func descriptorOf(raw detectDetectFd) rule.Descriptor {
	d := rule.Descriptor{Kind: kindWords[detectDetectKind(raw.Kind)], Inode: raw.Inode, Direction: directionWords[detectDetectDirection(raw.Direction)],
		RemotePort: raw.RemotePort, LocalPort: raw.LocalPort, TCP: raw.IsTcp != 0}
	if a := netip.AddrFrom16(raw.Remote).Unmap(); raw.RemotePort != 0 {
		d.Remote = a.String()
	}
	return d
}

// argsOf are arguments, each with its zero; the last one may be cut.
func argsOf(raw []int8) (args []string) {
	plain := make([]byte, len(raw))
	for i, c := range raw {
		plain[i] = byte(c)
	}
	for one := range bytes.SplitSeq(bytes.TrimSuffix(plain, []byte{0}), []byte{0}) {
		args = append(args, strings.ToValidUTF8(string(one), "�"))
	}
	return args
}
