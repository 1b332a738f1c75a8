package rule

import (
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
	get  func(*Event) any // a value of the kind: bool, int64, string, []string, []Process
}

// Fields in the order in which they are listed.
var Fields = slices.Concat([]Field{
	field("event.type", text, "exec, connect, accept, dup, open, setuid, module, bpf, ptrace, mount or memfd", func(e *Event) any { return e.Type }),
	field("process.pid", integer, "process ID", func(e *Event) any { return int64(e.Process.PID) }),
	field("process.program", text, "path of the executable", func(e *Event) any { return e.Process.Program }),
	field("process.name", text, "the last part of that path", func(e *Event) any { return nameOf(e.Process) }),
	field("process.comm", text, "what the process calls itself", func(e *Event) any { return e.Process.Comm }),
	field("process.args", texts, "its arguments, the first 512 bytes", func(e *Event) any { return e.Process.Args }),
	field("process.uid", integer, "real user ID", func(e *Event) any { return int64(e.User.UID) }),
	field("process.euid", integer, "effective user ID", func(e *Event) any { return int64(e.User.EUID) }),
	field("process.deleted", boolean, "the executable has no name: it was deleted, or is a memfd", func(e *Event) any { return e.Deleted }),
	field("process.memfd", boolean, "the executable is a memfd", func(e *Event) any { return e.Deleted && strings.HasPrefix(nameOf(e.Process), "memfd:") }),
	field("process.container", text, "ID of the container by the cgroup's name; empty: none", func(e *Event) any { return e.Container }),
	field("parent.pid", integer, "process ID of the parent", func(e *Event) any { return int64(e.parent().PID) }),
	field("parent.program", text, "path of the parent's executable; empty: not known", func(e *Event) any { return e.parent().Program }),
	field("parent.name", text, "the last part of that path, or what the parent calls itself", func(e *Event) any { return nameOf(e.parent()) }),
	field("ancestors", processes, "the processes above, the parent first; each has pid, program, name and comm", func(e *Event) any { return e.Ancestors }),
	field("exec.path", text, "what was executed, as it was written: a script too", func(e *Event) any { return e.Path }, Exec),
	field("exec.parent_outs", integer, "how many of the parent's descriptors 0 to 15 lead to sockets that this host connected", func(e *Event) any { return int64(e.ParentOuts) }, Exec),
	field("dup.fd", integer, "the new descriptor: 0, 1 or 2", func(e *Event) any { return int64(e.FD) }, Dup),
	field("file.path", text, "path of the file", func(e *Event) any { return e.Path }, Open, MemFD),
	field("file.name", text, "the last part of that path", func(e *Event) any { return path.Base(e.Path) }, Open, MemFD),
	field("file.write", boolean, "it was opened to be written", func(e *Event) any { return e.Write }, Open),
	field("setuid.from_uid", integer, "real user ID before", func(e *Event) any { return int64(e.before().UID) }, SetUID),
	field("setuid.from_euid", integer, "effective user ID before", func(e *Event) any { return int64(e.before().EUID) }, SetUID),
	field("module.name", text, "the kernel module", func(e *Event) any { return e.Path }, Module),
	field("ptrace.request", text, "poke, attach, seize or write; write is process_vm_writev", func(e *Event) any { return e.Request }, Ptrace),
	field("ptrace.target", integer, "process ID of the other process", func(e *Event) any { return int64(e.Target) }, Ptrace),
	field("mount.target", text, "where it is mounted, as it was written", func(e *Event) any { return e.Path }, Mount),
	field("socket.remote", text, "address of the peer", func(e *Event) any { return e.socket().Remote }, Connect, Accept),
	field("socket.remote_port", integer, "port of the peer", func(e *Event) any { return int64(e.socket().RemotePort) }, Connect, Accept),
	field("socket.local_port", integer, "port of this host", func(e *Event) any { return int64(e.socket().LocalPort) }, Connect, Accept),
	field("socket.loopback", boolean, "the peer's address is of this host's own loopback, 127.0.0.0/8 or ::1", func(e *Event) any { return isLoopback(e.socket().Remote) }, Connect, Accept),
}, descriptorFields("stdin", 0), descriptorFields("stdout", 1), descriptorFields("stderr", 2), descriptorFields("fd3", 3))

func field(name string, k kind, doc string, get func(*Event) any, of ...string) Field {
	return Field{Name: name, Kind: string(k), Of: of, Doc: doc, kind: k, get: get}
}

func descriptorFields(name string, fd int) []Field {
	return []Field{
		field(name+".kind", text, "closed, file, device, pipe, inet, unix, socket or other", func(e *Event) any { return e.FDs[fd].Kind }),
		field(name+".inode", integer, "two descriptors with the same one lead to the same pipe, socket or file", func(e *Event) any { return int64(e.FDs[fd].Inode) }),
		field(name+".direction", text, "of inet: out, this host connected it; in, accepted or older than the sensor; or empty", func(e *Event) any { return e.FDs[fd].Direction }),
		field(name+".remote", text, "of inet: address of the peer", func(e *Event) any { return e.FDs[fd].Remote }),
		field(name+".remote_port", integer, "of inet: port of the peer", func(e *Event) any { return int64(e.FDs[fd].RemotePort) }),
		field(name+".loopback", boolean, "of inet: the peer's address is 127.0.0.0/8 or ::1", func(e *Event) any { return isLoopback(e.FDs[fd].Remote) }),
	}
}

// processFields are the fields of a process of the list ancestors.
var processFields = map[string]struct {
	kind kind
	get  func(Process) any
}{
	"pid":     {integer, func(p Process) any { return int64(p.PID) }},
	"program": {text, func(p Process) any { return p.Program }},
	"name":    {text, func(p Process) any { return nameOf(p) }},
	"comm":    {text, func(p Process) any { return p.Comm }},
}

func nameOf(p Process) string {
	if p.Program == "" {
		return p.Comm
	}
	return path.Base(p.Program)
}

func (e *Event) parent() Process {
	if len(e.Ancestors) == 0 {
		return Process{}
	}
	return e.Ancestors[0]
}

func (e *Event) before() User {
	if e.Before == nil {
		return User{}
	}
	return *e.Before
}

func (e *Event) socket() Descriptor {
	if e.Socket == nil {
		return Descriptor{}
	}
	return *e.Socket
}

func isLoopback(address string) bool {
	a, err := netip.ParseAddr(address)
	return err == nil && a.IsLoopback()
}

// Value is the field's of an event: a bool, an int64, a string, a []string or a []Process.
func (f Field) Value(e *Event) any { return f.get(e) }

// ProcessValues are the values of a process of a list, by name.
func ProcessValues(p Process) map[string]any {
	all := map[string]any{}
	for name, f := range processFields {
		all[name] = f.get(p)
	}
	return all
}
