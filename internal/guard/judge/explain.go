package judge

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// The sources of an explanation.
const (
	FromKernel = "kernel" // the labels and the trust that are in force
	FromPolicy = "policy" // a file, which need not be in force
	FromOpens  = "opens"  // the process that opens wait for, without BPF LSM
)

// Verdicts of an explanation.
const (
	Allowed  = "allowed"
	Denied   = "denied"
	Audited  = "audited" // allowed, and reported
	NoObject = "nothing" // the operation has no object
	// Unenforced is the verdict on an operation that rules forbid, but that is neither denied nor reported without BPF LSM.
	Unenforced = "not enforced"
)

// Explanation lists the operations on a file that a process may do, with the reasons.
type Explanation struct {
	From       string   `json:"from"`
	Enforced   bool     `json:"enforced"`
	Why        string   `json:"why,omitempty"` // why it is not enforced
	Policy     uint64   `json:"policy"`        // the number of the policy in force; 0: the explanation is of a file
	File       Object   `json:"file"`
	Process    Subject  `json:"process"`
	Operations []Answer `json:"operations"`
}

// Object is a file as the rules see it.
type Object struct {
	Path    string   `json:"path"` // without symbolic links
	Exists  bool     `json:"exists"`
	Inode   uint64   `json:"inode"`  // 0: it does not exist
	Device  string   `json:"device"` // MAJOR:MINOR
	Rules   []string `json:"rules"`  // rules that protect it; if it does not exist, rules of its folder
	By      string   `json:"by,omitempty"`
	Above   []string `json:"above"`   // rules that protect something in this folder
	Program []string `json:"program"` // rules that trust it as a program, and so protect it
}

// Subject is a process as the rules see it.
type Subject struct {
	PID       int        `json:"pid"`
	Trusted   []Reason   `json:"trusted"`   // by rules that protect the file
	Untrusted []Reason   `json:"untrusted"` // by rules that protect the file
	Protected []string   `json:"protected"` // rules that protect the process
	Chain     []Ancestor `json:"chain"`     // the process itself, and those above it
}

// Reason says why a rule trusts a process, or does not.
type Reason struct {
	Rule string `json:"rule"`
	Why  string `json:"why"`
	PID  int    `json:"pid,omitempty"` // the process of the chain that gave the trust, or lost it; 0: no running process
}

// Ancestor is a process of the chain.
type Ancestor struct {
	PID     int      `json:"pid"`
	Comm    string   `json:"comm"`
	Program string   `json:"program"`
	Trusted []string `json:"trusted"` // rules that trust the process
	Gives   []string `json:"gives"`   // rules that trust its executable

	has    Standing
	marked Marks // of its executable
}

// Answer is the verdict on an operation.
type Answer struct {
	Operation string   `json:"operation"`
	Verdict   string   `json:"verdict"`
	Rules     []string `json:"rules"`   // that deny it, or audit it
	Trusted   []string `json:"trusted"` // that forbid it, and trust the process
}

// ExplainPolicy answers by a policy that need not be in force, with /proc for processes. It does not know a loss of trust in the past, such as to a
// debugger that has left.
func ExplainPolicy(p policy.Policy, path string, process int) (*Explanation, error) {
	r, b, err := Read(p, nil)
	if err != nil {
		return nil, err
	}
	b.Label = func(path string) (m Marks, err error) {
		err = Opened(path, func(fd int) error {
			var stat unix.Stat_t
			err := unix.Fstat(fd, &stat)
			m = r.Marks[InodeOf(stat)]
			return err
		})
		return m, err
	}
	all, err := lookAll()
	if err != nil {
		return nil, err
	}
	standings := r.Standings(func(id int) *Process { return all[id] }, nil)
	b.Has = func(id int) (Standing, error) { return standings.Of(id), nil }
	e, err := b.Explain(path, process)
	if err == nil {
		e.From = FromPolicy
	}
	return e, err
}

// Explain answers for all operations on the file that a path leads to, or would lead to. The caller says where the answer is from.
func (b *Book) Explain(path string, process int) (*Explanation, error) {
	e := &Explanation{}
	own, folder, err := b.object(path, &e.File)
	if err != nil {
		return nil, err
	}
	if e.Process.Chain, err = b.chain(process); err != nil {
		return nil, err
	}
	first := e.Process.Chain[0]
	e.Process.PID, e.Process.Protected = first.PID, b.words(first.has.Guards&^b.only()|b.Groups.protect(first.PID))
	about := (own.Rules | own.Above | own.Trusts | folder.Rules) &^ (b.only() &^ first.has.Guards)
	var control map[string]uint64
	if file, is := controlAt(e.File.Path); is {
		control = file.about(&b.Groups)
		about = control[policy.Kill] | control[policy.Move]
		if e.File.Rules = b.words(about); about != 0 {
			e.File.By = "its cgroup"
		}
	}
	e.Process.Trusted, e.Process.Untrusted = []Reason{}, []Reason{}
	for i, name := range b.Names {
		bit := uint64(1) << i
		switch {
		case about&bit == 0:
		case first.has.Trusts&bit != 0 && b.Scopes.unmet(i, first.PID) != "":
			e.Process.Untrusted = append(e.Process.Untrusted, Reason{name, b.Scopes.unmet(i, first.PID), first.PID})
		case first.has.Trusts&bit != 0:
			e.Process.Trusted = append(e.Process.Trusted, trustedWhy(name, bit, e.Process.Chain))
		default:
			e.Process.Untrusted = append(e.Process.Untrusted, b.untrustedWhy(name, bit, e.Process.Chain))
		}
	}
	first.has.Trusts = b.Scopes.Here(first.has.Trusts, first.PID)
	if control != nil {
		e.Operations = b.controlAnswers(control, first.has.Guards|b.Groups.protect(first.PID), first.has)
		return e, nil
	}
	e.Operations = b.answers(e.File, own, folder, first.has)
	return e, nil
}

// object examines a file: its label, and the label of the folder that has its name.
func (b *Book) object(path string, o *Object) (own, folder Marks, err error) {
	absolute, err := filepath.Abs(path)
	if err != nil {
		return own, folder, fmt.Errorf("look at %s: %w", path, err)
	}
	o.Path, err = filepath.EvalSymlinks(absolute)
	o.Exists = err == nil
	if errors.Is(err, os.ErrNotExist) { // a name for a new file
		var in string
		in, err = filepath.EvalSymlinks(filepath.Dir(absolute))
		o.Path = filepath.Join(in, filepath.Base(absolute))
	}
	if err != nil {
		return own, folder, fmt.Errorf("look at the file: %w. Name an existing file, or a new name in an existing folder", err)
	}
	if folder, err = b.under(filepath.Dir(o.Path)); err != nil {
		return own, folder, err
	}
	o.Rules, o.Above, o.Program = b.words(folder.Rules), []string{}, []string{}
	if !o.Exists {
		o.By = "its folder"
		return own, folder, nil
	}
	var stat unix.Stat_t
	if err := unix.Stat(o.Path, &stat); err != nil {
		return own, folder, &fs.PathError{Op: "stat", Path: o.Path, Err: err}
	}
	o.Inode, o.Device = stat.Ino, fmt.Sprintf("%d:%d", unix.Major(stat.Dev), unix.Minor(stat.Dev))
	labelled, err := b.Label(o.Path)
	if err != nil {
		return own, folder, err
	}
	if own, err = b.under(o.Path); err != nil {
		return own, folder, err
	}
	switch {
	case labelled.Rules != 0:
		o.By = "its inode's label"
	case own.Rules != 0:
		o.By = ByMovedFolder
	}
	o.Rules, o.Above, o.Program = b.words(own.Rules), b.words(own.Above), b.words(own.Trusts)
	return own, folder, nil
}

// ByMovedFolder is Object.By of a file that was moved together with a folder.
const ByMovedFolder = "a folder above it, which was moved there"

// chain returns a process with the processes above it. A process whose parent has ended is below the process that has
// adopted it.
func (b *Book) chain(id int) (all []Ancestor, err error) {
	id, err = leader(id)
	if err != nil {
		return nil, err
	}
	for len(all) < ancestorsMax {
		a := Ancestor{PID: id}
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", id))
		parent, _, ok := origin(id)
		if err != nil || !ok {
			if len(all) == 0 {
				return nil, fmt.Errorf("there is no process %d", id)
			}
			break // the process has ended meanwhile
		}
		a.Comm = strings.TrimSpace(string(comm))
		exe := fmt.Sprintf("/proc/%d/exe", id)
		if a.Program, err = os.Readlink(exe); err == nil {
			// The process may end meanwhile: then it gives no trust.
			if a.marked, err = b.Label(exe); err != nil && !errors.Is(err, os.ErrNotExist) {
				return nil, err
			}
		}
		if a.has, err = b.Has(id); err != nil {
			return nil, fmt.Errorf("read the trust of process %d: %w", id, err)
		}
		a.Trusted, a.Gives = b.words(a.has.Trusts), b.words(a.marked.Trusts)
		all = append(all, a)
		if parent == 0 {
			break
		}
		id = parent
	}
	return all, nil
}

// leader returns the process of a thread.
func leader(id int) (int, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", id))
	if err != nil {
		return 0, fmt.Errorf("there is no process %d", id)
	}
	for line := range strings.Lines(string(text)) {
		if number, is := strings.CutPrefix(line, "Tgid:"); is {
			return strconv.Atoi(strings.TrimSpace(number))
		}
	}
	return id, nil
}

// trustedWhy names the process that gave the trust.
func trustedWhy(name string, bit uint64, chain []Ancestor) Reason {
	for i, a := range chain {
		switch {
		case a.has.Trusts&bit == 0:
			return Reason{Rule: name, Why: "the trust comes from a process that has ended"}
		case a.marked.Trusts&bit == 0:
		case i == 0:
			return Reason{name, "the rule names its executable, " + a.Program, a.PID}
		default:
			return Reason{name, fmt.Sprintf("it comes from process %d (%s), whose executable %s the rule names", a.PID, a.Comm, a.Program), a.PID}
		}
	}
	if last := chain[len(chain)-1]; last.PID == 1 {
		return Reason{name, "the rule trusts process 1", 1}
	}
	return Reason{Rule: name, Why: "the trust comes from a process that has ended"}
}

// untrustedWhy names the process of the chain that lost the trust, and the reason.
func (b *Book) untrustedWhy(name string, bit uint64, chain []Ancestor) Reason {
	for i, a := range chain {
		if a.marked.Trusts&bit != 0 && a.has.Trusts&bit == 0 {
			return Reason{name, fmt.Sprintf("the rule names %s, and process %d lost its trust: %s", a.Program, a.PID, lostBy(a)), a.PID}
		}
		if a.has.Trusts&bit == 0 {
			continue
		}
		child := chain[i-1] // the first one is not trusted
		return Reason{name, fmt.Sprintf("process %d (%s) is trusted, and process %d is not: %s", a.PID, a.Comm, child.PID, b.notInherited(bit, child)), child.PID}
	}
	why := fmt.Sprintf("it does not name %s, and trusts no process above", chain[0].Program)
	if strings.HasSuffix(chain[0].Program, " (deleted)") {
		why += ". The file was deleted or replaced since the process began: start the process again, and load the policy again if it names the program"
	} else {
		why += ". A copy, and a file that was replaced after the policy was loaded, is another program"
	}
	return Reason{Rule: name, Why: why}
}

// notInherited returns the reason why a process did not get the trust of its parent.
func (b *Book) notInherited(bit uint64, child Ancestor) string {
	switch {
	case b.Children&bit == 0:
		return "the rule does not trust programs that its programs start (children: true)"
	case child.marked.Interprets&bit != 0:
		return fmt.Sprintf("it runs %s, an interpreter that the rule does not list in interpreters", child.Program)
	}
	return lostBy(child)
}

// lostBy returns the reason why a process has lost its trust, as far as it can still be seen.
func lostBy(a Ancestor) string {
	switch {
	case nameless(a.PID):
		return "it runs a file without a name (a memfd, or a file that was deleted or replaced since)"
	case traced(a.PID):
		return "another process traces it"
	}
	if text, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", a.PID)); err == nil {
		if variable := loads(string(text)); variable != "" {
			return fmt.Sprintf("its environment has %s, which loads code", variable)
		}
	}
	return "it lost the trust earlier, to a debugger or to a program that it ran meanwhile, or it began before the rule was in force"
}
