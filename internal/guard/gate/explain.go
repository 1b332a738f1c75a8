package gate

import (
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/judge"
)

// Explain answers by the policy in force, with the trust from /proc, as for an open. A denial of an operation that no open performs is judge.Unenforced.
// path is a path in the mount namespace of this process.
func (g *Gate) Explain(path string, process int) (*judge.Explanation, error) {
	r, _, _, err := g.look(judge.Inode{})
	if err != nil {
		return nil, err
	}
	b := *r.book
	b.Label = func(path string) (m judge.Marks, err error) {
		err = judge.Opened(path, func(fd int) error {
			var stat unix.Stat_t
			if err := unix.Fstat(fd, &stat); err != nil {
				return err
			}
			_, m, _, err = g.lookIn(r, judge.InodeOf(stat))
			return err
		})
		return m, err
	}
	b.Has = func(id int) (judge.Standing, error) { return r.given(id), nil }
	b.Moved = true // a new file has no marks of its own if no open of it waits
	e, err := b.Explain(path, process)
	if err != nil {
		return nil, err
	}
	e.From, e.Enforced = judge.FromOpens, true
	if e.File.By == judge.ByMovedFolder {
		e.File.By = "a folder above it"
	}
	for i, a := range e.Operations {
		if isForbidden := a.Verdict == judge.Denied || a.Verdict == judge.Audited; isForbidden && held[a.Operation] == "" && a.Operation != judge.WriteProgram {
			e.Operations[i].Verdict = judge.Unenforced
		}
	}
	return e, nil
}

// given returns the present standing of a thread in any user and cgroup.
func (r *ruling) given(tid int) judge.Standing { return r.reading.StandingNow(tid, *r.programs.Load()) }

// standing returns the present standing of a waiting thread in its user and cgroup.
func (r *ruling) standing(tid int) judge.Standing {
	of := r.given(tid)
	of.Trusts = r.book.Scopes.Here(of.Trusts, tid)
	return of
}
