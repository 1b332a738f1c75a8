package protect

import (
	"golang.org/x/sys/unix"
)

// Explain answers by the policy in force, with the trust from /proc, as for an open. A denial of an operation that no open performs is Unenforced.
// path is a path in the mount namespace of this process.
func (g *Gate) Explain(path string, process int) (*Explanation, error) {
	r, _, _, err := g.look(inode{})
	if err != nil {
		return nil, err
	}
	b := *r.book
	b.label = func(path string) (m marks, err error) {
		err = opened(path, func(fd int) error {
			var stat unix.Stat_t
			if err := unix.Fstat(fd, &stat); err != nil {
				return err
			}
			_, m, _, err = g.lookIn(r, inode{stat.Dev, stat.Ino})
			return err
		})
		return m, err
	}
	b.has = func(id int) (standing, error) { return r.given(id), nil }
	b.moved = true // a new file has no marks of its own if no open of it waits
	e, err := b.explain(path, process)
	if err != nil {
		return nil, err
	}
	e.From, e.Enforced = FromOpens, true
	if e.File.By == byMovedFolder {
		e.File.By = "a folder above it"
	}
	for i, a := range e.Operations {
		if isForbidden := a.Verdict == Denied || a.Verdict == Audited; isForbidden && held[a.Operation] == "" && a.Operation != wordOf(guardGuardOpGUARD_PROGRAM) {
			e.Operations[i].Verdict = Unenforced
		}
	}
	return e, nil
}

// given returns the present standing of a thread in any user and cgroup, by the program of its process and, for rules that trust children, by the programs
// of the processes above it. A process whose starter has ended is below the process that adopted it.
func (r *ruling) given(tid int) standing {
	for range standingTries {
		all := chainOf(tid, r.labels.children != 0)
		l := labeler{marks: *r.programs.Load(), pids: r.labels.pids, children: r.labels.children, standings: map[int]standing{}}
		if all[tid] == nil {
			return standing{}
		}
		of := l.standing(tid, all, 0)
		if len(all) == 1 || of.trusts == 0 || isSame(all) {
			return of
		}
	}
	return standing{} // the processes above it change too fast to be known
}

// standing returns the present standing of a waiting thread in its user and cgroup.
func (r *ruling) standing(tid int) standing {
	of := r.given(tid)
	of.trusts = r.book.narrows.here(of.trusts, tid)
	return of
}

// standingTries limits the number of times that the processes above a process are read again because one of them ended
// meanwhile.
const standingTries = 10

// chainOf returns a thread and the processes above it.
func chainOf(tid int, isAbove bool) map[int]*running {
	all := map[int]*running{}
	for id := tid; id > 0 && len(all) < ancestorsMax; {
		p, err := look(id, nil)
		if p == nil || err != nil {
			break
		}
		all[id] = p
		if !isAbove {
			break
		}
		id = p.parent
	}
	return all
}

// isSame reports whether the processes still run, each below the same process: otherwise a number may have been another process's.
func isSame(all map[int]*running) bool {
	for id, p := range all {
		if parent, key, ok := origin(id); !ok || parent != p.parent || key != p.key {
			return false
		}
	}
	return true
}
