package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/config"
)

// Key is the policy's key, at the top of a file.
const Key = "guard"

// RulesMax is the largest number of rules of a policy: in the programs a rule is a bit of a word.
const RulesMax = 64

// FilesMax is the largest number of files that shunt protects, with programs and folders above.
const FilesMax = 1 << 18

// Operations are the operations that a rule can deny. The values are the words of the file.
const (
	Write  = "write"
	Create = "create"
	Delete = "delete"
	Rename = "rename"
	Link   = "link"
	Chmod  = "chmod"
	Mount  = "mount"
)

// Operations are in the order in which they are listed.
var Operations = []string{Write, Create, Delete, Rename, Link, Chmod, Mount}

// The operations on processes that a rule can deny.
const (
	Kill   = "kill"
	Ptrace = "ptrace"
	Memory = "memory"
	Move   = "move" // only of a rule that names a cgroup
)

// ProcessOperations are the operations that each rule of processes can deny, in the order in which they are listed.
var ProcessOperations = []string{Kill, Ptrace, Memory}

// The modes of a rule.
const (
	Audit = "audit"
	Deny  = "deny"
)

// Rule protects files or processes.
type Rule struct {
	Name    string
	Paths   []string // of files: absolute and clean
	Program string   // of processes: the executable, absolute and clean; or
	PIDFile string   // a file with the process's number; or
	Cgroup  string   // the cgroup of processes, with those below it: absolute and clean; or
	IsSelf  bool     // the guard's own process
	Deny    []string // words of Operations, or of ProcessOperations and Move, each once
	Trust   Trust
	Mode    string
	At      string // its position in the file: FILE:LINE

	IsUpdaters bool     // shunt's own rule: it protects the programs that it trusts, which are the policy's updaters
	IsDetected bool     // a rule of detection whose action is deny
	By         []string // of rules of detection: programs, absolute and clean, to which alone it is denied; empty: to all
	Severity   string   // of rules of detection
	Mitre      []string // of rules of detection: techniques
}

// IsOfProcesses reports whether the rule protects processes, and not files.
func (r Rule) IsOfProcesses() bool { return len(r.Paths) == 0 && !r.IsDetected && !r.IsUpdaters }

// Trust names the programs that may do the denied operations nevertheless.
type Trust struct {
	Programs     []Program
	Children     bool     // also programs that these start
	Interpreters []string // absolute and clean: interpreters that these may start
	IsInit       bool     // the first process of the machine, which starts and stops services
	User         string   // name or number of the only trusted user; empty: all
	Cgroup       string   // absolute and clean: the only trusted cgroup, with those below it; empty: all
}

// Program is an executable.
type Program struct {
	Path   string // absolute and clean
	SHA256 string // digest of its contents in hexadecimal; empty: any contents
}

// Programs returns executables without digests.
func Programs(paths ...string) (all []Program) {
	for _, path := range paths {
		all = append(all, Program{Path: path})
	}
	return all
}

// Policy has the demands of a file.
type Policy struct {
	Rules      []Rule
	IsDegraded bool // rules that this kernel cannot enforce are no fault
	Detection  Detection

	IsDenialOff bool // operations that rules of detection would deny are only reported

	Connections []Connection
	Decoys      []Decoys
}

// MustEnforce reports whether it is a fault if the kernel enforces nothing.
func (p Policy) MustEnforce() bool {
	return !p.IsDegraded && slices.ContainsFunc(p.Enforced(), func(r Rule) bool { return r.Mode == Deny })
}

type guardEntry struct {
	config.Mark `json:"-"`
	Degraded    config.Word                  `json:"degraded,omitempty" doc:"What shunt does on a kernel that cannot enforce a rule of mode deny. refuse: report a fault and end; allow: warn, and refuse opens of protected files as long as shunt guard run is running." enum:"refuse|allow" default:"refuse" example:"allow"`
	Self        config.Boolean               `json:"self,omitempty" doc:"Protect the process of shunt guard run from signals and debuggers of all processes except process 1." default:"false" example:"true"`
	Updaters    config.Many[config.Phrase]   `json:"updaters,omitempty" doc:"Programs that install other programs, such as dpkg. If an updater makes a file, no other process opens it for writing, and the updater renames it over a trusted program, the new file is trusted without loading the policy again. A user who may run an updater can replace trusted programs. Rules in which a program has a digest are left out." min:"1" max:"4095" example:"[/usr/bin/dpkg]"`
	Protect     config.List[protectEntry]    `json:"protect,omitempty" doc:"Files and folders that are protected." example:"[{name: data, paths: [/srv/data], deny: [write, delete], mode: audit}]"`
	Processes   config.List[processEntry]    `json:"processes,omitempty" doc:"Processes that are protected." example:"[{name: app, program: /usr/sbin/app, deny: [kill, ptrace], mode: audit}]"`
	Connections config.List[connectionEntry] `json:"connections,omitempty" doc:"Connections that programs must not make." example:"[{name: no-mail, program: /usr/sbin/app, deny: [connect], to: [':25'], mode: audit}]"`
	Detect      detectEntry                  `json:"detect,omitempty" doc:"Rules that detect intruders, for shunt guard run and shunt guard events. {} means the built-in rules." example:"{kill: [reverse-shell]}"`
	Decoys      config.List[decoyEntry]      `json:"decoys,omitempty" doc:"Folders in which shunt puts decoys, files that nobody has a reason to change, to find programs that encrypt files." example:"[{folders: [/srv/data], action: stop}]"`
}

type protectEntry struct {
	config.Mark `json:"-"`
	Name        config.Text                `json:"name" doc:"The rule's name in events and in the status." min:"1" max:"63" example:"data"`
	Paths       config.Many[config.Phrase] `json:"paths" doc:"Files and folders. A folder is protected with all files in it, also with later ones." min:"1" max:"4095" example:"[/srv/data]"`
	Deny        config.Many[config.Word]   `json:"deny" doc:"The operations that programs must not do unless they are trusted. write: change contents, also through a descriptor or mapping that was opened before; create: make a name in a folder; delete: remove a name, also by putting another file in its place; rename: move the file, or a folder above it; link: give it another name; chmod: change mode, owner, times, flags, ACLs and extended attributes; mount: mount over it or over a folder above it, or unmount it; read: read its contents, also through a descriptor that was opened before, or list the names in a folder; exec: execute it, or map it as code." enum:"write|create|delete|rename|link|chmod|mount|read|exec" example:"[write, delete]"`
	Trust       trustEntry                 `json:"trust,omitempty" doc:"The programs that may do it all the same." example:"{programs: [/usr/sbin/app]}"`
	Mode        config.Word                `json:"mode" doc:"audit: allow the operation and report it; deny: refuse it with EPERM and report it." enum:"audit|deny" example:"audit"`
}

type processEntry struct {
	config.Mark `json:"-"`
	Name        config.Text              `json:"name" doc:"The rule's name in events and in the status." min:"1" max:"63" example:"app"`
	Program     config.Phrase            `json:"program,omitempty" doc:"All processes that run this executable." min:"1" max:"4095" example:"/usr/sbin/app"`
	PIDFile     config.Phrase            `json:"pid-file,omitempty" doc:"The file with the number of the process. The process that has this number when the policy is loaded is protected, with the processes that it forks." min:"1" max:"4095" example:"/run/app.pid"`
	Cgroup      config.Phrase            `json:"cgroup,omitempty" doc:"The processes that are in this cgroup, or in a cgroup below it, at the time of the operation: its path in cgroup v2, as in /proc/PID/cgroup. It need not exist when the policy is loaded." min:"2" max:"760" example:"/system.slice/app.service"`
	Deny        config.Many[config.Word] `json:"deny" doc:"The operations that other processes must not do to these processes unless they are trusted. kill: send a signal, also by a file's owner (F_SETOWN), or set a limit; with cgroup, also write to the cgroup's files, such as cgroup.kill, cgroup.freeze, memory.max and cgroup.procs; ptrace, memory: control the process as a debugger does, read or write its memory, take its descriptors. The kernel has one check for the two, so each word denies both; move, only with cgroup: move any process of the machine from one cgroup to another if the nearest cgroup above both is also above this cgroup. Without it, a process can be moved out of the cgroup and then ended." enum:"kill|ptrace|memory|move" example:"[kill, ptrace]"`
	Trust       trustEntry               `json:"trust,omitempty" doc:"The programs that may do it all the same. The processes of the rule may do it to each other." example:"{programs: [/usr/bin/systemctl]}"`
	Mode        config.Word              `json:"mode" doc:"audit: allow the operation and report it; deny: refuse it with EPERM and report it." enum:"audit|deny" example:"audit"`
}

type trustEntry struct {
	config.Mark  `json:"-"`
	Programs     config.Many[config.Phrase] `json:"programs,omitempty" doc:"Executables. A copy is another program. Other programs cannot write to the executable. With @sha256:DIGEST after the path, shunt loads the policy only if the file has this digest." min:"1" max:"4183" example:"[/usr/sbin/app]"`
	Children     config.Boolean             `json:"children,omitempty" doc:"Trust the programs that these start, and those that they start in turn. The trust ends at a program whose environment loads code (LD_PRELOAD and its like), that a debugger controls, or that has no name (memfd), and at an interpreter that is not in interpreters." default:"false" example:"true"`
	Interpreters config.Many[config.Phrase] `json:"interpreters,omitempty" doc:"Shells and other interpreters that are trusted when a trusted program starts them, with any script. A script that is executed directly needs no entry here." min:"1" max:"4095" example:"[/bin/dash]"`
	User         config.Phrase              `json:"user,omitempty" doc:"Trust the programs only while this user, by name or number, is both their real and their effective user. shunt checks it at each attempt, so a process that takes another user loses the trust. The number is the machine's, so root of a user namespace is not root." min:"1" max:"32" example:"backup"`
	Cgroup       config.Phrase              `json:"cgroup,omitempty" doc:"Trust the programs only in this cgroup and in cgroups below it: its path in cgroup v2, as in /proc/PID/cgroup. It need not exist when the policy is loaded." min:"2" max:"760" example:"/system.slice/app.service"`
}

// Part returns the key for a format of files.
func Part() config.Part {
	return config.NewSection(Key, "Files and processes that are protected by the kernel.", "{protect: [{name: data, paths: [/srv/data], deny: [write, delete], mode: audit}]}", build)
}

var format = config.NewFormat(Part())

// Load reads a policy from a file, or from a directory's *.yaml. If a fault is an error, the policy must
// not be used. The error says that a file could not be read.
func Load(file string) (Policy, []config.Fault, error) {
	contents, err := format.Read(file)
	if err != nil {
		return Policy{}, nil, err
	}
	p, _ := contents.Settings[Key].(Policy)
	return p, contents.Faults.Sorted(), nil
}

// Schema returns the JSON Schema of a policy's file, for editors.
func Schema() []byte { return format.Schema("Policy of shunt guard") }

// build checks the meaning of the rules.
func build(g *guardEntry, read *config.Contents) any {
	p := Policy{IsDegraded: g.Degraded.Value == "allow"}
	if !g.Set && !read.Unparsed {
		read.Faults.Errorf(config.Mark{At: g.At.Whole()}, "name the files to protect, for example guard: {protect: [{name: data, paths: [/srv/data], deny: [write, delete], mode: audit}]}", "there is no key %q", Key)
	}
	names := map[string]bool{}
	add := func(name config.Text, r Rule) {
		if r.Name != "" && names[r.Name] {
			read.Faults.Errorf(name.Mark, "give each rule a name of its own", "an earlier rule has the name %q, too", r.Name)
		}
		names[r.Name] = true
		p.Rules = append(p.Rules, r)
	}
	for i := range g.Protect.Items {
		add(g.Protect.Items[i].Name, g.Protect.Items[i].rule(&read.Faults))
	}
	for i := range g.Processes.Items {
		add(g.Processes.Items[i].Name, g.Processes.Items[i].rule(&read.Faults))
	}
	if g.Self.Value {
		add(config.Text{Mark: g.Self.Mark}, Rule{Name: "self", IsSelf: true, Deny: ProcessOperations, Trust: Trust{IsInit: true}, Mode: Deny, At: g.Self.At.String()})
	}
	p.Detection = g.Detect.detection(&read.Faults)
	g.addUpdaters(p.Enforced(), add, &read.Faults)
	for _, d := range p.Detection.Denials {
		if names[d.Name] {
			read.Faults.Errorf(g.Detect.Mark, "give each rule a name of its own", "the rule %q of detect denies, and a rule of protect or processes has the same name", d.Name)
		}
	}
	if n := len(p.Enforced()); n > RulesMax {
		read.Faults.Errorf(g.Mark, "join rules that deny the same", "%d rules, and at most %d are possible", n, RulesMax)
		return Policy{}
	}
	p.Connections = connections(g.Connections.Items, names, &read.Faults)
	taken := map[string]bool{}
	for i := range g.Decoys.Items {
		p.Decoys = append(p.Decoys, g.Decoys.Items[i].decoys(taken, &read.Faults))
	}
	if p.IsEmpty() && g.Set && !read.Unparsed && !g.Protect.Bad && !g.Processes.Bad && !g.Connections.Bad && !g.Detect.Bad && !g.Decoys.Bad {
		read.Faults.Errorf(g.Mark, "write a rule under protect, processes or connections, or detect: {}, or decoys, or leave guard out", "the policy has no rules")
	}
	return p
}

func (e *protectEntry) rule(faults *config.Faults) Rule {
	return Rule{Name: e.Name.Value, Mode: e.Mode.Value, At: e.At.String(), Paths: paths(e.Paths.Items, faults), Deny: words(e.Deny, faults), Trust: e.Trust.trust(faults)}
}

func (e *processEntry) rule(faults *config.Faults) Rule {
	r := Rule{Name: e.Name.Value, Mode: e.Mode.Value, At: e.At.String(), Deny: words(e.Deny, faults), Trust: e.Trust.trust(faults)}
	one := func(p config.Phrase) string {
		if clean := paths([]config.Phrase{p}, faults); len(clean) > 0 {
			return clean[0]
		}
		return ""
	}
	r.Program, r.PIDFile = one(e.Program), one(e.PIDFile)
	if e.Cgroup.Value != "" {
		r.Cgroup = cgroupPath(e.Cgroup, faults)
	}
	named, isBad := 0, false
	for _, by := range []config.Phrase{e.Program, e.PIDFile, e.Cgroup} {
		if by.Set {
			named++
		}
		isBad = isBad || by.Bad
	}
	if named != 1 && !isBad {
		faults.Errorf(e.Mark, "write program, pid-file or cgroup", "a rule of processes names them by one of program, pid-file and cgroup")
	}
	if slices.Contains(r.Deny, Move) && !e.Cgroup.Set && !isBad {
		faults.Errorf(e.Deny.Mark, "leave move out, or name the cgroup", "the rule denies %s, which needs a cgroup, and names none", Move)
	}
	return r
}

// words returns the words of a list, each once.
func words(list config.Many[config.Word], faults *config.Faults) (all []string) {
	for _, word := range list.Items {
		switch {
		case word.Value == "": // it is faulty already
		case slices.Contains(all, word.Value):
			faults.Warnf(word.Mark, "remove one of them", "deny has %s twice", word.Value)
		default:
			all = append(all, word.Value)
		}
	}
	return all
}

func (e *trustEntry) trust(faults *config.Faults) Trust {
	t := Trust{Children: e.Children.Value, Interpreters: paths(e.Interpreters.Items, faults)}
	digests := map[string]string{}
	plain := make([]config.Phrase, 0, len(e.Programs.Items))
	for _, item := range e.Programs.Items {
		file, digest, has := strings.Cut(item.Value, digestMark)
		if raw, err := hex.DecodeString(digest); has && (err != nil || len(raw) != sha256.Size) {
			faults.Errorf(item.Mark, "write what sha256sum prints", "%q is not a SHA-256, which has 64 hexadecimal digits", digest)
		}
		if item.Value = file; has {
			digests[path.Clean(file)] = strings.ToLower(digest)
		}
		if Interprets(file) {
			faults.Warnf(item.Mark, "name a program with one task", "%s runs any script: the rule would trust all scripts, also an intruder's", file)
		}
		plain = append(plain, item)
	}
	for _, file := range paths(plain, faults) {
		t.Programs = append(t.Programs, Program{file, digests[file]})
	}
	t.narrow(e, faults)
	if len(t.Interpreters) > 0 && !t.Children {
		faults.Errorf(e.Interpreters.Mark, "write children: true, or leave it out", "interpreters has no effect without children: a rule trusts programs that trusted programs start only with children: true")
	}
	return t
}

// digestMark separates a program and its digest.
const digestMark = "@sha256:"

// paths returns the absolute paths of a list, each once and as short as possible.
func paths(list []config.Phrase, faults *config.Faults) (clean []string) {
	for _, item := range list {
		switch short := path.Clean(item.Value); {
		case item.Value == "": // it is faulty already
		case !path.IsAbs(item.Value):
			faults.Errorf(item.Mark, "begin it with /", "the path %q is not absolute", item.Value)
		case short == "/":
			faults.Errorf(item.Mark, "name folders in it", "the root cannot be protected: no program could write to any file")
		case slices.ContainsFunc(kernelOwn, func(own string) bool { return short == own || strings.HasPrefix(short, own+"/") }):
			faults.Errorf(item.Mark, "name files of a disk", "%s belongs to the kernel, and is no file of a disk", item.Value)
		case slices.Contains(clean, short):
			faults.Warnf(item.Mark, "remove one of them", "%s is there twice", short)
		default:
			clean = append(clean, short)
		}
	}
	return clean
}

// kernelOwn are folders of the kernel, whose inodes come and go.
var kernelOwn = []string{"/proc", "/sys"}

// Interpreters are programs that run scripts. Debian and others append a version to some of the names.
var Interpreters = []string{"sh", "bash", "dash", "zsh", "ksh", "fish", "csh", "tcsh", "busybox", "python", "perl", "ruby", "node", "nodejs", "php", "lua", "luajit", "tclsh", "guile",
	"awk", "gawk", "mawk", "env", "java", "gdb", "xargs", "expect"}

// Interprets reports whether a program of this name runs scripts.
func Interprets(program string) bool {
	base := strings.TrimRight(path.Base(program), "0123456789.")
	return slices.Contains(Interpreters, base)
}

// String returns the rule as one line for people.
func (r Rule) String() string {
	object := strings.Join(r.Paths, ", ")
	switch {
	case r.Program != "":
		object = "processes of " + r.Program
	case r.PIDFile != "":
		object = "the process of " + r.PIDFile
	case r.Cgroup != "":
		object = "processes in cgroup " + r.Cgroup
	case r.IsSelf:
		object = "the guard's process"
	case r.IsUpdaters:
		return fmt.Sprintf("%s: writing to %v by others, and tracing it. Programs that it replaces stay trusted", r.Mode, r.Trust)
	}
	if object != "" {
		object = " of " + object
	}
	who := "all"
	if trusted := r.Trust.String(); trusted != nobody {
		who += " but " + trusted
	}
	if len(r.By) > 0 {
		who = strings.Join(r.By, ", ")
	}
	return fmt.Sprintf("%s: %s%s by %s", r.Mode, strings.Join(r.Deny, ", "), object, who)
}

const nobody = "nobody"

// String returns the trusted programs as text for people.
func (t Trust) String() string {
	var who []string
	for _, program := range t.Programs {
		who = append(who, program.Path)
	}
	if t.IsInit {
		who = append(who, "process 1")
	}
	if len(who) == 0 {
		return nobody
	}
	text := strings.Join(who, ", ")
	if t.Children {
		text += " and what they start"
	}
	if t.User != "" {
		text += " as user " + t.User
	}
	if t.Cgroup != "" {
		text += " in cgroup " + t.Cgroup
	}
	return text
}
