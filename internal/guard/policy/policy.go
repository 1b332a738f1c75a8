package policy

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/config"
)

// Key is the policy's, at the top of a file.
const Key = "guard"

// RulesMax is how many rules a policy may have: the programs have a rule as a bit of a word.
const RulesMax = 64

// Operations are what a rule can deny. The values are the words of the file.
const (
	Write  = "write"
	Create = "create"
	Delete = "delete"
	Rename = "rename"
	Link   = "link"
	Chmod  = "chmod"
	Mount  = "mount"
)

// Operations in the order in which they are listed.
var Operations = []string{Write, Create, Delete, Rename, Link, Chmod, Mount}

// The modes of a rule.
const (
	Audit = "audit"
	Deny  = "deny"
)

// Rule is one thing that is protected.
type Rule struct {
	Name     string
	Paths    []string // absolute and clean
	Deny     []string // words of Operations, each once
	Programs []string // absolute and clean: executables that may do all of it
	Mode     string
	At       string // where it is written: FILE:LINE
}

// Policy is what a file asks for.
type Policy struct{ Rules []Rule }

type guardEntry struct {
	config.Mark `json:"-"`
	Protect     config.List[protectEntry] `json:"protect" doc:"Files and folders that are protected." example:"[{name: data, paths: [/srv/data], deny: [write, delete], mode: audit}]"`
	Processes   config.Later              `json:"processes,omitempty" doc:"Processes that are protected." instead:"protect the files of the program"`
	Connections config.Later              `json:"connections,omitempty" doc:"Connections that are denied." instead:"use the firewall"`
	Detect      config.Later              `json:"detect,omitempty" doc:"Rules that detect an intrusion." instead:"leave it out"`
}

type protectEntry struct {
	config.Mark `json:"-"`
	Name        config.Text                `json:"name" doc:"What events and the status call the rule." min:"1" max:"63" example:"data"`
	Paths       config.Many[config.Phrase] `json:"paths" doc:"Files and folders. A folder is protected with all in it, also what is made there later." min:"1" max:"4095" example:"[/srv/data]"`
	Deny        config.Many[config.Word]   `json:"deny" doc:"What programs that are not trusted must not do. write: change contents, also by what was opened or mapped before; create: make a name in a folder; delete: take a name away, also by putting another file in its place; rename: move it, or a folder above it; link: give it another name; chmod: change mode, owner, times, flags, ACLs and extended attributes; mount: mount over it or over a folder above it, or unmount it." enum:"write|create|delete|rename|link|chmod|mount" later:"read: take the permission to read away with chmod|exec: take the permission to run away with chmod" example:"[write, delete]"`
	Trust       trustEntry                 `json:"trust,omitempty" doc:"Who may do it nevertheless." example:"{programs: [/usr/sbin/app]}"`
	Mode        config.Word                `json:"mode" doc:"audit: allow it and tell; deny: refuse it with EPERM and tell." enum:"audit|deny" example:"audit"`
}

type trustEntry struct {
	config.Mark `json:"-"`
	Programs    config.Many[config.Phrase] `json:"programs,omitempty" doc:"Executables. A copy of one is another program. The executable itself is protected from being written." min:"1" max:"4095" example:"[/usr/sbin/app]"`
	Children    config.Later               `json:"children,omitempty" doc:"Trust the programs that these start." instead:"name these programs as well"`
	User        config.Later               `json:"user,omitempty" doc:"Trust only processes of this user." instead:"leave it out"`
	Cgroup      config.Later               `json:"cgroup,omitempty" doc:"Trust only processes of this cgroup." instead:"leave it out"`
}

// Part is the key for a format of files.
func Part() config.Part {
	return config.NewSection(Key, "Files that are protected by the kernel.", "{protect: [{name: data, paths: [/srv/data], deny: [write, delete], mode: audit}]}", build)
}

var format = config.NewFormat(Part())

// Load reads a policy from a file, or from a directory's *.yaml. If a fault is an error, the policy is not
// to be used. The error says that something could not be read.
func Load(file string) (Policy, []config.Fault, error) {
	contents, err := format.Read(file)
	if err != nil {
		return Policy{}, nil, err
	}
	p, _ := contents.Settings[Key].(Policy)
	return p, contents.Faults.Sorted(), nil
}

// Schema is the JSON Schema of a policy's file, for editors.
func Schema() []byte { return format.Schema("Policy of shunt guard") }

// build checks what the rules mean.
func build(g *guardEntry, read *config.Contents) any {
	var p Policy
	if !g.Set && !read.Unparsed {
		read.Faults.Errorf(config.Mark{At: g.At.Whole()}, "say what to protect, for example guard: {protect: [{name: data, paths: [/srv/data], deny: [write, delete], mode: audit}]}", "there is no key %q", Key)
	}
	if len(g.Protect.Items) > RulesMax {
		read.Faults.Errorf(g.Protect.Mark, "join rules that deny the same", "%d rules, and at most %d are possible", len(g.Protect.Items), RulesMax)
		return p
	}
	names := map[string]bool{}
	for i := range g.Protect.Items {
		entry := &g.Protect.Items[i]
		if name := entry.Name.Value; name != "" && names[name] {
			read.Faults.Errorf(entry.Name.Mark, "give each rule a name of its own", "a rule before this one is called %q too", name)
		}
		names[entry.Name.Value] = true
		p.Rules = append(p.Rules, entry.rule(&read.Faults))
	}
	if g.Protect.Set && len(g.Protect.Items) == 0 && !read.Unparsed && !g.Protect.Bad {
		read.Faults.Errorf(g.Protect.Mark, "write a rule, or leave guard out", "nothing is protected")
	}
	return p
}

func (e *protectEntry) rule(faults *config.Faults) Rule {
	r := Rule{Name: e.Name.Value, Mode: e.Mode.Value, At: e.At.String()}
	r.Paths = paths(e.Paths, faults)
	r.Programs = paths(e.Trust.Programs, faults)
	for _, word := range e.Deny.Items {
		switch {
		case word.Value == "": // it has a fault already
		case slices.Contains(r.Deny, word.Value):
			faults.Warnf(word.Mark, "remove one of them", "deny has %s twice", word.Value)
		default:
			r.Deny = append(r.Deny, word.Value)
		}
	}
	for _, program := range e.Trust.Programs.Items {
		if interprets(program.Value) {
			faults.Warnf(program.Mark, "name a program that does one thing", "%s runs what it is given: all scripts are trusted by that, those of an intruder too", program.Value)
		}
	}
	return r
}

// paths are those of a list that are absolute, each once and as short as it can be written.
func paths(list config.Many[config.Phrase], faults *config.Faults) (clean []string) {
	for _, item := range list.Items {
		switch short := path.Clean(item.Value); {
		case item.Value == "": // it has a fault already
		case !path.IsAbs(item.Value):
			faults.Errorf(item.Mark, "begin it with /", "the path %q is not absolute", item.Value)
		case short == "/":
			faults.Errorf(item.Mark, "name folders in it", "the root cannot be protected: nothing could be written any more, by anybody")
		case slices.ContainsFunc(kernelOwn, func(own string) bool { return short == own || strings.HasPrefix(short, own+"/") }):
			faults.Errorf(item.Mark, "name files of a disk", "%s is the kernel's own, and no file", item.Value)
		case slices.Contains(clean, short):
			faults.Warnf(item.Mark, "remove one of them", "%s is there twice", short)
		default:
			clean = append(clean, short)
		}
	}
	return clean
}

// kernelOwn are folders of the kernel's, whose inodes come and go.
var kernelOwn = []string{"/proc", "/sys"}

// interpreters run what they are given. The list is for a warning only.
var interpreters = []string{"sh", "bash", "dash", "zsh", "ksh", "busybox", "python", "perl", "ruby", "node", "php", "lua", "awk", "gawk", "mawk", "env", "java"}

func interprets(program string) bool {
	base := strings.TrimRight(path.Base(program), "0123456789.")
	return slices.Contains(interpreters, base)
}

// String is the rule in one line, for people.
func (r Rule) String() string {
	trust := "nobody"
	if len(r.Programs) > 0 {
		trust = strings.Join(r.Programs, ", ")
	}
	return fmt.Sprintf("%s: %s of %s by all but %s", r.Mode, strings.Join(r.Deny, ", "), strings.Join(r.Paths, ", "), trust)
}
