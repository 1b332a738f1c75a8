package detect

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"unicode/utf8"
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

// requests has the numbers of ptrace(2) in linux/ptrace.h; the last one means process_vm_writev(2).
var requests = map[uint32]string{4: "poke", 5: "poke", 13: "poke", 16: "attach", 0x4205: "poke", 0x4206: "seize", 0xffffffff: "write"}

// decoder reads events into the same memory, one after the other.
type decoder struct {
	event  rule.Event
	file   rule.File
	socket rule.Descriptor
	before rule.User
	raw    detectDetectEvent
	clock  event.Clock
	texts  []byte // the event's strings point into it
}

// decode reads a program's event, which the next one overwrites: Clone makes a lasting copy. It allocates nothing once
// it has seen as much text. The error means that the program is of another version.
func (d *decoder) decode(e event.Event) (*rule.Event, error) {
	raw := &d.raw
	if copy(unsafe.Slice((*byte)(unsafe.Pointer(raw)), unsafe.Sizeof(*raw)), e.Payload) != int(unsafe.Sizeof(*raw)) {
		return nil, fmt.Errorf("decode an event: %d bytes, and it has %d; the programs are of another version of shunt", len(e.Payload), unsafe.Sizeof(*raw))
	}
	word, known := typeWords[detectDetectType(raw.Type)]
	if !known {
		return nil, fmt.Errorf("decode an event: its type is %d; the programs are of another version of shunt", raw.Type)
	}
	d.texts = d.texts[:0]
	args, ancestors := d.event.Process.Args[:0], d.event.Ancestors[:0]
	if ancestors == nil {
		ancestors = []rule.Process{}
	}
	d.event = rule.Event{Time: d.clock.Time(e.TimeNs), Type: word, Deleted: raw.ProgramLinks == 0, User: userOf(raw.Cred), CgroupID: e.CgroupID, Netns: e.Netns, Mntns: e.Mntns,
		Write: raw.IsWrite != 0, Mode: raw.Mode, FD: raw.Fd, Target: raw.Target, ParentOuts: raw.ParentOuts,
		Process: rule.Process{PID: e.Tgid, StartNs: e.TaskStartNs, Comm: d.text(raw.Comm[:]), Executable: fileOf(raw.Program)}}
	if raw.Program.Inode != 0 {
		d.event.Process.Program = d.path(raw.ProgramNames[:min(int(raw.ProgramSize), len(raw.ProgramNames))])
	} else {
		d.event.Deleted = false // a thread of the kernel
	}
	d.event.Process.Args = d.args(args, raw.Args[:min(int(raw.ArgsSize), len(raw.Args))])
	for i := range raw.Parents {
		p := &raw.Parents[i]
		if p.Tgid == 0 {
			break
		}
		ancestors = append(ancestors, rule.Process{PID: p.Tgid, StartNs: p.StartNs, Comm: d.text(p.Comm[:]), Executable: fileOf(p.Program)})
	}
	d.event.Ancestors = ancestors
	for i := range raw.Fds {
		d.event.FDs[i] = d.descriptor(&raw.Fds[i])
	}
	d.object(raw, word)
	return &d.event, nil
}

// object reads the object of an event of a type.
func (d *decoder) object(raw *detectDetectEvent, word string) {
	object := raw.Object[:min(int(raw.ObjectSize), len(raw.Object))]
	switch word {
	case rule.Open, rule.MemFD:
		d.file = fileOf(raw.File)
		d.event.Path, d.event.File = d.path(object), &d.file
	case rule.Exec, rule.Mount, rule.Module:
		d.event.Path = d.text(object)
	case rule.Connect, rule.Accept:
		d.socket = d.descriptor(&raw.Socket)
		d.event.Socket = &d.socket
	case rule.SetUID:
		d.before = userOf(raw.Before)
		d.event.Before = &d.before
	case rule.Ptrace:
		d.event.Request = requests[raw.Number]
	}
}

// since returns the text that was added from a position on. It is valid as long as the event.
func (d *decoder) since(begin int) string {
	return unsafe.String(unsafe.SliceData(d.texts[begin:]), len(d.texts)-begin)
}

func (d *decoder) text(raw []int8) string {
	begin := len(d.texts)
	d.texts = event.AppendText(d.texts, raw)
	return d.since(begin)
}

func (d *decoder) path(raw []int8) string {
	begin := len(d.texts)
	d.texts = event.AppendPath(d.texts, raw)
	return d.since(begin)
}

// args appends arguments, each ended by a zero; the last one may be cut. Invalid UTF-8 in an argument is replaced.
func (d *decoder) args(to []string, raw []int8) []string {
	for len(raw) > 0 || len(to) == 0 {
		one, rest := raw, []int8(nil)
		if end := slices.Index(raw, 0); end >= 0 {
			one, rest = raw[:end], raw[end+1:]
		}
		text := d.text(one)
		if !utf8.ValidString(text) {
			text = strings.ToValidUTF8(text, "\uFFFD")
		}
		to, raw = append(to, text), rest
	}
	return to
}

func (d *decoder) descriptor(raw *detectDetectFd) rule.Descriptor {
	one := rule.Descriptor{Kind: kindWords[detectDetectKind(raw.Kind)], Inode: raw.Inode, Direction: directionWords[detectDetectDirection(raw.Direction)],
		RemotePort: raw.RemotePort, LocalPort: raw.LocalPort, TCP: raw.IsTcp != 0}
	if raw.RemotePort != 0 {
		begin := len(d.texts)
		d.texts = netip.AddrFrom16(raw.Remote).Unmap().AppendTo(d.texts)
		one.Remote = d.since(begin)
	}
	return one
}

func userOf(c detectDetectCred) rule.User { return rule.User{UID: c.Uid, EUID: c.Euid} }

func fileOf(f detectGuardFile) rule.File {
	return rule.File{Inode: f.Inode, Device: f.Device, Generation: f.Generation}
}
