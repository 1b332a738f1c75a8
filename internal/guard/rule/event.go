package rule

import (
	"slices"
	"strings"
	"time"
)

// The types of events.
const (
	Exec    = "exec"
	Connect = "connect"
	Accept  = "accept"
	Dup     = "dup"
	Open    = "open"
	SetUID  = "setuid"
	Module  = "module"
	BPF     = "bpf"
	Ptrace  = "ptrace"
	Mount   = "mount"
	MemFD   = "memfd"
)

// Types are in the order in which they are listed.
var Types = []string{Exec, Connect, Accept, Dup, Open, SetUID, Module, BPF, Ptrace, Mount, MemFD}

// The kinds of objects that a descriptor leads to.
const (
	Closed = "closed"
	Plain  = "file"
	Device = "device" // a character device: a terminal, /dev/null
	Pipe   = "pipe"
	Inet   = "inet"
	Unix   = "unix"
	Socket = "socket"
	Other  = "other"
)

// The directions of a socket.
const (
	Out = "out" // this host has connected it
	In  = "in"  // this host accepted it, or it is older than the sensor
)

// File identifies a file by its device and inode.
type File struct {
	Inode      uint64 `json:"inode"`
	Device     uint32 `json:"device"` // major << 20 | minor
	Generation uint32 `json:"generation"`
}

// Process is a process; PID and StartNs identify it: no later one has the same values.
type Process struct {
	PID        uint32   `json:"pid"`
	StartNs    uint64   `json:"start_ns"` // CLOCK_BOOTTIME
	Program    string   `json:"program"`  // path of the executable; of ancestors "" if it is not known
	Executable File     `json:"executable"`
	Comm       string   `json:"comm"`
	Args       []string `json:"args,omitempty"`
}

// Descriptor is the object that a descriptor leads to.
type Descriptor struct {
	Kind       string `json:"kind"`
	Inode      uint64 `json:"inode,omitempty"`
	Direction  string `json:"direction,omitempty"`
	Remote     string `json:"remote,omitempty"` // address
	RemotePort uint16 `json:"remote_port,omitempty"`
	LocalPort  uint16 `json:"local_port,omitempty"`
	TCP        bool   `json:"tcp,omitempty"`
}

// User is a real and an effective user ID.
type User struct {
	UID  uint32 `json:"uid"`
	EUID uint32 `json:"euid"`
}

// Event is an act of a process.
type Event struct {
	Time      time.Time     `json:"time"`
	Type      string        `json:"type"`
	Process   Process       `json:"process"`
	Deleted   bool          `json:"deleted,omitempty"` // the executable has no name
	User      User          `json:"user"`
	Ancestors []Process     `json:"ancestors"` // the parent first
	FDs       [4]Descriptor `json:"fds"`       // 0 to 3
	CgroupID  uint64        `json:"cgroup"`
	Container string        `json:"container,omitempty"` // its ID, from the cgroup's name
	Netns     uint32        `json:"netns"`
	Mntns     uint32        `json:"mntns"`

	Path       string      `json:"path,omitempty"`   // of exec: as given to the call; open, memfd, mount; of module: its name
	File       *File       `json:"file,omitempty"`   // of open, memfd
	Write      bool        `json:"write,omitempty"`  // of open
	Mode       uint32      `json:"mode,omitempty"`   // of open: the file's, with its type
	FD         uint32      `json:"fd,omitempty"`     // of dup: the new descriptor
	Socket     *Descriptor `json:"socket,omitempty"` // of connect, accept
	Before     *User       `json:"before,omitempty"` // of setuid
	Request    string      `json:"request,omitempty"`
	Target     uint32      `json:"target,omitempty"`      // of ptrace: process ID
	ParentOuts uint32      `json:"parent_outs,omitempty"` // of exec: the parent's descriptors to sockets that it connected
}

// Clone returns a copy that shares no memory with the event.
func (e *Event) Clone() *Event {
	c := *e
	c.Process = e.Process.clone()
	c.Ancestors = make([]Process, len(e.Ancestors)) // never nil: JSON has a list
	for i, a := range e.Ancestors {
		c.Ancestors[i] = a.clone()
	}
	for i := range c.FDs {
		c.FDs[i].Remote = strings.Clone(c.FDs[i].Remote)
	}
	c.Container, c.Path = strings.Clone(e.Container), strings.Clone(e.Path)
	c.File, c.Before = copied(e.File), copied(e.Before)
	if c.Socket = copied(e.Socket); c.Socket != nil {
		c.Socket.Remote = strings.Clone(c.Socket.Remote)
	}
	return &c
}

func (p Process) clone() Process {
	p.Program, p.Comm, p.Args = strings.Clone(p.Program), strings.Clone(p.Comm), slices.Clone(p.Args)
	for i := range p.Args {
		p.Args[i] = strings.Clone(p.Args[i])
	}
	return p
}

func copied[T any](of *T) *T {
	if of == nil {
		return nil
	}
	one := *of
	return &one
}
