package rule

import (
	"cmp"
	"net/netip"
	"path"
	"slices"
	"strings"
)

// kind is a type of the language.
type kind string

const (
	boolean   kind = "bool"
	integer   kind = "int"
	text      kind = "string"
	texts     kind = "list(string)"
	integers  kind = "list(int)"
	processes kind = "list(process)"
)

// Field is a name that expressions can use.
type Field struct {
	Name string
	Kind string
	Of   []string // types of events that have it; nil: all
	Doc  string

	kind kind
	get  values[*Event]
}

// values has the function of one kind, which returns the value of an event, a process, or an environment. Each kind has its own, so that no value
// is allocated.
type values[From any] struct {
	boolean   func(From) bool
	integer   func(From) int64
	text      func(From) string
	texts     func(From) []string
	integers  func(From) []int64
	processes func(From) []Process
}

// of returns the values of a thing for another one that leads to it.
func of[From, To any](v values[From], lead func(To) From) (w values[To]) {
	switch {
	case v.boolean != nil:
		w.boolean = func(to To) bool { return v.boolean(lead(to)) }
	case v.integer != nil:
		w.integer = func(to To) int64 { return v.integer(lead(to)) }
	case v.text != nil:
		w.text = func(to To) string { return v.text(lead(to)) }
	case v.texts != nil:
		w.texts = func(to To) []string { return v.texts(lead(to)) }
	case v.integers != nil:
		w.integers = func(to To) []int64 { return v.integers(lead(to)) }
	default:
		w.processes = func(to To) []Process { return v.processes(lead(to)) }
	}
	return w
}

func (v values[From]) kind() kind {
	switch {
	case v.boolean != nil:
		return boolean
	case v.integer != nil:
		return integer
	case v.text != nil:
		return text
	case v.texts != nil:
		return texts
	case v.integers != nil:
		return integers
	}
	return processes
}

// any returns the value, of any kind: a bool, an int64, a string, a []string, a []int64 or a []Process.
func (v values[From]) any(from From) any {
	switch {
	case v.boolean != nil:
		return v.boolean(from)
	case v.integer != nil:
		return v.integer(from)
	case v.text != nil:
		return v.text(from)
	case v.texts != nil:
		return v.texts(from)
	case v.integers != nil:
		return v.integers(from)
	}
	return v.processes(from)
}

// Fields are in the order in which they are listed.
var Fields = slices.Concat([]Field{
	field("event.type", "exec, connect, accept, dup, open, setuid, module, bpf, ptrace, mount or memfd", values[*Event]{text: func(e *Event) string { return e.Type }}),
	field("process.pid", "process ID", values[*Event]{integer: func(e *Event) int64 { return int64(e.Process.PID) }}),
	field("process.program", "path of the executable", values[*Event]{text: func(e *Event) string { return e.Process.Program }}),
	field("process.name", "the last part of that path", values[*Event]{text: func(e *Event) string { return nameOf(&e.Process) }}),
	field("process.comm", "the name that the process gave itself", values[*Event]{text: func(e *Event) string { return e.Process.Comm }}),
	field("process.args", "its arguments, the first 512 bytes", values[*Event]{texts: func(e *Event) []string { return e.Process.Args }}),
	field("process.uid", "real user ID", values[*Event]{integer: func(e *Event) int64 { return int64(e.User.UID) }}),
	field("process.euid", "effective user ID", values[*Event]{integer: func(e *Event) int64 { return int64(e.User.EUID) }}),
	field("process.deleted", "the executable has no name: it was deleted, or is a memfd", values[*Event]{boolean: func(e *Event) bool { return e.Deleted }}),
	field("process.memfd", "the executable is a memfd", values[*Event]{boolean: func(e *Event) bool { return e.Deleted && strings.HasPrefix(nameOf(&e.Process), "memfd:") }}),
	field("process.container", "ID of the container by the cgroup's name; empty: none", values[*Event]{text: func(e *Event) string { return e.Container }}),
	field("parent.pid", "process ID of the parent", values[*Event]{integer: func(e *Event) int64 { return int64(e.parent().PID) }}),
	field("parent.program", "path of the parent's executable; empty: not known", values[*Event]{text: func(e *Event) string { return e.parent().Program }}),
	field("parent.name", "the last part of that path, or the name that the parent gave itself", values[*Event]{text: func(e *Event) string { return nameOf(e.parent()) }}),
	field("ancestors", "the processes above, the parent first; each has pid, program, name and comm", values[*Event]{processes: func(e *Event) []Process { return e.Ancestors }}),
	field("exec.path", "the path that was executed, as it was written; also a script's", values[*Event]{text: func(e *Event) string { return e.Path }}, Exec),
	field("exec.parent_outs", "how many of the parent's descriptors 0 to 15 lead to sockets that this host connected", values[*Event]{integer: func(e *Event) int64 { return int64(e.ParentOuts) }}, Exec),
	field("dup.fd", "the new descriptor: 0, 1 or 2", values[*Event]{integer: func(e *Event) int64 { return int64(e.FD) }}, Dup),
	field("file.path", "path of the file", values[*Event]{text: func(e *Event) string { return e.Path }}, Open, MemFD),
	field("file.name", "the last part of that path", values[*Event]{text: func(e *Event) string { return path.Base(e.Path) }}, Open, MemFD),
	field("file.write", "the file was opened for writing", values[*Event]{boolean: func(e *Event) bool { return e.Write }}, Open),
	field("setuid.from_uid", "real user ID before", values[*Event]{integer: func(e *Event) int64 { return int64(e.before().UID) }}, SetUID),
	field("setuid.from_euid", "effective user ID before", values[*Event]{integer: func(e *Event) int64 { return int64(e.before().EUID) }}, SetUID),
	field("module.name", "the kernel module", values[*Event]{text: func(e *Event) string { return e.Path }}, Module),
	field("ptrace.request", "poke, attach, seize or write; write is process_vm_writev", values[*Event]{text: func(e *Event) string { return e.Request }}, Ptrace),
	field("ptrace.target", "process ID of the other process", values[*Event]{integer: func(e *Event) int64 { return int64(e.Target) }}, Ptrace),
	field("mount.target", "where it is mounted, as it was written", values[*Event]{text: func(e *Event) string { return e.Path }}, Mount),
	field("socket.remote", "address of the peer", values[*Event]{text: func(e *Event) string { return e.socket().Remote }}, Connect, Accept),
	field("socket.remote_port", "port of the peer", values[*Event]{integer: func(e *Event) int64 { return int64(e.socket().RemotePort) }}, Connect, Accept),
	field("socket.local_port", "port of this host", values[*Event]{integer: func(e *Event) int64 { return int64(e.socket().LocalPort) }}, Connect, Accept),
	field("socket.loopback", "the peer's address is of this host's own loopback, 127.0.0.0/8 or ::1", values[*Event]{boolean: func(e *Event) bool { return isLoopback(e.socket().Remote) }}, Connect, Accept),
}, descriptorFields("stdin", 0), descriptorFields("stdout", 1), descriptorFields("stderr", 2), descriptorFields("fd3", 3))

func field(name, doc string, get values[*Event], of ...string) Field {
	return Field{Name: name, Kind: string(get.kind()), Of: of, Doc: doc, kind: get.kind(), get: get}
}

func descriptorFields(name string, fd int) []Field {
	return []Field{
		field(name+".kind", "closed, file, device, pipe, inet, unix, socket or other", values[*Event]{text: func(e *Event) string { return e.FDs[fd].Kind }}),
		field(name+".inode", "two descriptors with the same value lead to the same pipe, socket or file", values[*Event]{integer: func(e *Event) int64 { return int64(e.FDs[fd].Inode) }}),
		field(name+".direction", "of inet: out, this host connected it; in, accepted or older than the sensor; or empty", values[*Event]{text: func(e *Event) string { return e.FDs[fd].Direction }}),
		field(name+".remote", "of inet: address of the peer", values[*Event]{text: func(e *Event) string { return e.FDs[fd].Remote }}),
		field(name+".remote_port", "of inet: port of the peer", values[*Event]{integer: func(e *Event) int64 { return int64(e.FDs[fd].RemotePort) }}),
		field(name+".loopback", "of inet: the peer's address is 127.0.0.0/8 or ::1", values[*Event]{boolean: func(e *Event) bool { return isLoopback(e.FDs[fd].Remote) }}),
	}
}

// processFields are the fields of a process of the list ancestors.
var processFields = map[string]values[*Process]{
	"pid":     {integer: func(p *Process) int64 { return int64(p.PID) }},
	"program": {text: func(p *Process) string { return p.Program }},
	"name":    {text: nameOf},
	"comm":    {text: func(p *Process) string { return p.Comm }},
}

func nameOf(p *Process) string {
	if p.Program == "" {
		return p.Comm
	}
	return path.Base(p.Program)
}

// Values for objects that an event does not have: they are never written.
var (
	noProcess Process
	noUser    User
	noSocket  Descriptor
)

func (e *Event) parent() *Process {
	if len(e.Ancestors) == 0 {
		return &noProcess
	}
	return &e.Ancestors[0]
}

func (e *Event) before() *User { return cmp.Or(e.Before, &noUser) }

func (e *Event) socket() *Descriptor { return cmp.Or(e.Socket, &noSocket) }

func isLoopback(address string) bool {
	a, err := netip.ParseAddr(address)
	return err == nil && a.IsLoopback()
}

// Value returns the field's value for an event: a bool, an int64, a string, a []string or a []Process.
func (f Field) Value(e *Event) any { return f.get.any(e) }

// ProcessValues returns the values of a process of a list, by name.
func ProcessValues(p Process) map[string]any {
	all := map[string]any{}
	for name, f := range processFields {
		all[name] = f.any(&p)
	}
	return all
}
