package trial

import (
	"golang.org/x/sys/unix"
)

// Row is an operation that programs try.
type Row struct {
	Group      string
	Name       string
	Operation  string     // that events name; empty: no event comes
	NotCovered string     // why it is not denied
	Errno      unix.Errno // the error with which it fails; 0: EPERM
	IsGuarded  bool       // the target is protected by a rule of processes, and not because it runs a trusted program
	IsKill     bool       // it ends the process
	IsSilent   bool       // it fails without an error
	IsNobodys  bool       // no program is trusted with it

	before  func(*work) error // in the same process, before the policy
	attempt func(*work) error
	isTrace bool // its target is a process, and no file changes
	setup   func(dir string) error
}

// IsAboutProcess reports whether the operation has a process as its target.
func (r *Row) IsAboutProcess() bool { return r.isTrace || r.IsGuarded }

// IsFromBefore reports whether the operation uses a descriptor or a mapping that the program got before the policy was loaded.
func (r *Row) IsFromBefore() bool { return r.before != nil }
