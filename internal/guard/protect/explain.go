package protect

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
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

	has    standing
	marked marks // of its executable
}

// Answer is the verdict on an operation.
type Answer struct {
	Operation string   `json:"operation"`
	Verdict   string   `json:"verdict"`
	Rules     []string `json:"rules"`   // that deny it, or audit it
	Trusted   []string `json:"trusted"` // that forbid it, and trust the process
}

// book is the source of an explanation.
type book struct {
	names    [policy.RulesMax]string
	masks    [guardGuardOpGUARD_OP_COUNT]guardGuardMasks
	children uint64 // rules that trust children
	narrows  narrows
	groups   narrows
	moved    bool                                // a file without a label of its own is under the rules of the folders above it
	label    func(path string) (marks, error)    // of the file that a path leads to
	has      func(process int) (standing, error) // also zero if it has ended
}

func (b *book) words(mask uint64) []string {
	words := []string{}
	for i, name := range b.names {
		if mask>>i&1 == 1 {
			words = append(words, name)
		}
	}
	return words
}

// only returns the rules that deny something only to certain processes, instead of protecting these.
func (b *book) only() (mask uint64) {
	for _, m := range b.masks {
		mask |= m.Only
	}
	return mask
}

// Explain answers by the policy in force, even if no process listens; nil: no policy is in force.
func Explain(root, path string, process int) (*Explanation, error) {
	maps, err := pinned(root)
	if maps == nil || err != nil {
		return nil, err
	}
	defer kernel.CloseMaps(maps)
	key, err := loadKey()
	if err != nil {
		return nil, err
	}
	defer key.Close() //nolint:errcheck // only run
	for range explainTries {
		var before, after guardGuardState
		if err := maps[guardMapShG_state].Lookup(uint32(0), &before); err != nil {
			return nil, fmt.Errorf("read the policy in force: %w", err)
		}
		if before.Generation == 0 {
			return nil, nil
		}
		b, err := bookOf(maps, key, before.Generation)
		if err != nil {
			return nil, err
		}
		e, err := b.explain(path, process)
		if err != nil {
			return nil, err
		}
		if err := maps[guardMapShG_state].Lookup(uint32(0), &after); err != nil {
			return nil, fmt.Errorf("read the policy in force: %w", err)
		}
		if after != before {
			continue // half of it may belong to another policy
		}
		e.From, e.Policy, e.Enforced = FromKernel, before.Generation, true
		if links, _ := filepath.Glob(filepath.Join(linksFolder(root), "*", "*")); len(links) == 0 { // the pattern is correct
			e.Enforced, e.Why = false, "no program of the guard is attached: run `shunt guard run` again"
		}
		return e, nil
	}
	return nil, fmt.Errorf("explain: the policy was changed %d times meanwhile; ask again", explainTries)
}

// explainTries limits the number of times that Explain begins again because the policy has changed.
const explainTries = 5

// loadKey loads the program that returns a file's identity. It needs no BPF LSM.
func loadKey() (*ebpf.Program, error) {
	spec, err := loadGuard()
	if err != nil {
		return nil, fmt.Errorf("read the embedded object of the guard: %w", err)
	}
	program, err := ebpf.NewProgram(spec.Programs[guardProgShKey])
	if err != nil {
		return nil, fmt.Errorf("load the program that reads a file's identity: %w", err)
	}
	return program, nil
}

// bookOf reads a generation from the kernel.
func bookOf(maps map[string]*ebpf.Map, key *ebpf.Program, generation uint64) (*book, error) {
	side := generation & 1
	b := &book{}
	for i := range uint32(policy.RulesMax) {
		r, err := ruleOf(maps[guardMapShG_rules], generation, i)
		if err != nil {
			return nil, err
		}
		b.names[i] = r.Name
	}
	var moved uint64
	err := errors.Join(maps[guardMapShG_children].Lookup(uint32(side), &b.children), maps[guardMapShG_moved].Lookup(uint32(0), &moved))
	for op := range b.masks {
		err = errors.Join(err, maps[guardMapShG_ops].Lookup(uint32(side)*uint32(guardGuardOpGUARD_OP_COUNT)+uint32(op), &b.masks[op]))
	}
	if err != nil {
		return nil, fmt.Errorf("read the operations that the rules in force forbid: %w", err)
	}
	b.moved = moved > 0
	if b.narrows, err = readNarrows(maps, uint32(side), trustScopes); err != nil {
		return nil, err
	}
	if b.groups, err = readNarrows(maps, uint32(side), processScopes); err != nil {
		return nil, err
	}
	l := &labeler{key: key, labels: maps[labelMaps[side]], files: maps[fileMaps[side]], generation: generation}
	b.label = func(path string) (m marks, err error) {
		err = opened(path, func(fd int) error {
			m, err = l.labelled(fd)
			return err
		})
		return m, err
	}
	b.has = func(id int) (standing, error) {
		p, err := look(id, maps)
		if err != nil || p == nil {
			return standing{}, err
		}
		return p.has(generation), nil
	}
	return b, nil
}

// opened calls do with a descriptor of the file that a path leads to.
func opened(path string, do func(fd int) error) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "look at", Path: path, Err: err}
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	return do(fd)
}

// labelled returns the kernel's label of an inode, as its programs look it up.
func (l *labeler) labelled(fd int) (marks, error) {
	var side guardGuardSide
	err := l.labels.Lookup(uint32(fd), &side)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		var file guardGuardFile
		if file, err = l.identity(fd); err == nil {
			err = l.files.Lookup(&file, &side)
		}
	}
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return marks{}, fmt.Errorf("read its label: %w", err)
	}
	if err != nil || side.Generation != l.generation {
		return marks{}, nil
	}
	return marks{side.Rules, side.Above, side.Trusts, side.Guards, side.Interprets}, nil
}

// ExplainPolicy answers by a policy that is not in force, with the same search for inodes and with /proc for
// processes. It does not know a loss of trust in the past, such as to a debugger that has left. Why has the kernel's reason, if it
// would refuse the policy.
func ExplainPolicy(p policy.Policy, path string, process int) (*Explanation, error) {
	e, err := explainFile(p, path, process)
	if err != nil {
		return nil, err
	}
	e.Why = "the answer comes from the file alone, and `shunt guard run` makes the kernel enforce it"
	var refused *Refusal
	if err := Enforces(); errors.As(err, &refused) {
		e.Why = fmt.Sprintf("this kernel does not let BPF programs decide (BPF LSM): %s. What to do: %s", refused.Reason, refused.Remedy)
	} else if err != nil {
		e.Why = err.Error()
	}
	return e, nil
}

func explainFile(p policy.Policy, path string, process int) (*Explanation, error) {
	l, b, err := onPaper(p, nil)
	if err != nil {
		return nil, err
	}
	b.label = func(path string) (m marks, err error) {
		err = opened(path, func(fd int) error {
			var stat unix.Stat_t
			err := unix.Fstat(fd, &stat)
			m = l.marks[inode{stat.Dev, stat.Ino}]
			return err
		})
		return m, err
	}
	l.standings = map[int]standing{}
	all, err := lookAll(nil)
	if err != nil {
		return nil, err
	}
	b.has = func(id int) (standing, error) {
		if all[id] == nil {
			return standing{}, nil
		}
		return l.standing(id, all, 0), nil
	}
	e, err := b.explain(path, process)
	if err == nil {
		e.From = FromPolicy
	}
	return e, err
}

// onPaper is a policy with nothing of it in the kernel: its marks by inode, and its rules. visit, if any, is called with each file of the rules, with
// a folder before it is read.
func onPaper(p policy.Policy, visit func(path string, d fs.DirEntry, rules uint64)) (*labeler, *book, error) {
	if err := allStraight(p); err != nil {
		return nil, nil, err
	}
	l := &labeler{visit: visit, paths: map[string]inode{}, objects: map[inode]protected{}, marks: map[inode]marks{}, pids: map[int]marks{}}
	b := &book{masks: masksOf(p.Enforced())}
	for i, r := range p.Enforced() {
		b.names[i] = r.Name
		if _, err := l.rule(i, r); err != nil {
			return nil, nil, err
		}
	}
	b.children, b.narrows, b.groups = l.children, l.narrows, l.groups
	return l, b, nil
}

func (b *book) explain(path string, process int) (*Explanation, error) {
	e := &Explanation{}
	own, folder, err := b.object(path, &e.File)
	if err != nil {
		return nil, err
	}
	if e.Process.Chain, err = b.chain(process); err != nil {
		return nil, err
	}
	first := e.Process.Chain[0]
	e.Process.PID, e.Process.Protected = first.PID, b.words(first.has.guards&^b.only()|b.groups.protect(first.PID))
	about := (own.rules | own.above | own.trusts | folder.rules) &^ (b.only() &^ first.has.guards)
	var control map[guardGuardOp]uint64
	if file, is := controlAt(e.File.Path); is {
		control = file.about(&b.groups)
		about = control[guardGuardOpGUARD_KILL] | control[guardGuardOpGUARD_MOVE]
		if e.File.Rules = b.words(about); about != 0 {
			e.File.By = "its cgroup"
		}
	}
	e.Process.Trusted, e.Process.Untrusted = []Reason{}, []Reason{}
	for i, name := range b.names {
		bit := uint64(1) << i
		switch {
		case about&bit == 0:
		case first.has.trusts&bit != 0 && b.narrows.unmet(i, first.PID) != "":
			e.Process.Untrusted = append(e.Process.Untrusted, Reason{name, b.narrows.unmet(i, first.PID), first.PID})
		case first.has.trusts&bit != 0:
			e.Process.Trusted = append(e.Process.Trusted, trustedWhy(name, bit, e.Process.Chain))
		default:
			e.Process.Untrusted = append(e.Process.Untrusted, b.untrustedWhy(name, bit, e.Process.Chain))
		}
	}
	first.has.trusts = b.narrows.here(first.has.trusts, first.PID)
	if control != nil {
		e.Operations = b.controlAnswers(control, first.has.guards|b.groups.protect(first.PID), first.has)
		return e, nil
	}
	e.Operations = b.answers(e.File, own, folder, first.has)
	return e, nil
}

// object examines a file: its label, and the label of the folder that has its name.
func (b *book) object(path string, o *Object) (own, folder marks, err error) {
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
	o.Rules, o.Above, o.Program = b.words(folder.rules), []string{}, []string{}
	if !o.Exists {
		o.By = "its folder"
		return own, folder, nil
	}
	var stat unix.Stat_t
	if err := unix.Stat(o.Path, &stat); err != nil {
		return own, folder, &fs.PathError{Op: "stat", Path: o.Path, Err: err}
	}
	o.Inode, o.Device = stat.Ino, fmt.Sprintf("%d:%d", unix.Major(stat.Dev), unix.Minor(stat.Dev))
	labelled, err := b.label(o.Path)
	if err != nil {
		return own, folder, err
	}
	if own, err = b.under(o.Path); err != nil {
		return own, folder, err
	}
	switch {
	case labelled.rules != 0:
		o.By = "its inode's label"
	case own.rules != 0:
		o.By = byMovedFolder
	}
	o.Rules, o.Above, o.Program = b.words(own.rules), b.words(own.above), b.words(own.trusts)
	return own, folder, nil
}

// byMovedFolder is Object.By of a file that was moved together with a folder.
const byMovedFolder = "a folder above it, which was moved there"

// under returns the label of the file that a path leads to. If it has none, and folders were moved into protected ones, the label has the rules of
// the nearest folder above with rules, as in rules_above of bpf/guard/label.h.
func (b *book) under(path string) (marks, error) {
	own, err := b.label(path)
	if err != nil || own.rules != 0 || !b.moved {
		return own, err
	}
	for at := filepath.Dir(path); ; at = filepath.Dir(at) {
		up, err := b.label(at)
		if err != nil || up.rules != 0 || at == "/" {
			own.rules = up.rules
			return own, err
		}
	}
}

// answers returns the answers for all operations on a file.
func (b *book) answers(o Object, own, folder marks, has standing) []Answer {
	in := own.rules // the folder for a new name
	info, err := os.Stat(o.Path)
	isFolder := err == nil && info.IsDir()
	if !o.Exists {
		in = folder.rules
	}
	about := map[string]uint64{
		policy.Write: own.rules, policy.Create: in, policy.Delete: own.rules | folder.rules, policy.Rename: own.rules | own.above | folder.rules,
		policy.Link: own.rules, policy.Chmod: own.rules, policy.Mount: own.rules | own.above,
	}
	all := make([]Answer, 0, len(policy.Operations)+1)
	for _, word := range policy.Operations {
		a := b.answer(operations[word], about[word], has)
		if word == policy.Create && o.Exists && !isFolder || word == policy.Write && isFolder || word != policy.Create && !o.Exists {
			a.Verdict, a.Rules, a.Trusted = NoObject, []string{}, []string{}
		}
		all = append(all, a)
	}
	for _, word := range []string{policy.Read, policy.Exec} { // few rules have these operations
		if masks := b.masks[operations[word]]; own.rules&(masks.Denied|masks.Audited) != 0 {
			all = append(all, b.answer(operations[word], own.rules, has))
		}
	}
	if own.trusts != 0 {
		all = append(all, b.answer(guardGuardOpGUARD_PROGRAM, own.trusts, has))
	}
	return all
}

// answer decides as attempt_judge of bpf/guard/judge.h.
func (b *book) answer(op guardGuardOp, rules uint64, has standing) Answer {
	masks := b.masks[op]
	forbids := rules & (masks.Denied | masks.Audited)
	forbids &= ^masks.Only | has.guards
	left := forbids &^ has.trusts
	a := Answer{Operation: wordOf(op), Verdict: Allowed, Rules: b.words(left), Trusted: b.words(forbids & has.trusts)}
	switch denied := left & masks.Denied; {
	case denied != 0:
		a.Verdict, a.Rules = Denied, b.words(denied)
	case left != 0:
		a.Verdict = Audited
	}
	return a
}

// chain returns a process with the processes above it. A process whose parent has ended is below the process that has
// adopted it.
func (b *book) chain(id int) (all []Ancestor, err error) {
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
			if a.marked, err = b.label(exe); err != nil && !errors.Is(err, os.ErrNotExist) {
				return nil, err
			}
		}
		if a.has, err = b.has(id); err != nil {
			return nil, fmt.Errorf("read the trust of process %d: %w", id, err)
		}
		a.Trusted, a.Gives = b.words(a.has.trusts), b.words(a.marked.trusts)
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
		case a.has.trusts&bit == 0:
			return Reason{Rule: name, Why: "the trust comes from a process that has ended"}
		case a.marked.trusts&bit == 0:
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
func (b *book) untrustedWhy(name string, bit uint64, chain []Ancestor) Reason {
	for i, a := range chain {
		if a.marked.trusts&bit != 0 && a.has.trusts&bit == 0 {
			return Reason{name, fmt.Sprintf("the rule names %s, and process %d lost its trust: %s", a.Program, a.PID, lostBy(a)), a.PID}
		}
		if a.has.trusts&bit == 0 {
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
func (b *book) notInherited(bit uint64, child Ancestor) string {
	switch {
	case b.children&bit == 0:
		return "the rule does not trust programs that its programs start (children: true)"
	case child.marked.interprets&bit != 0:
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
