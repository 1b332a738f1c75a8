package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// Detection is the section of rules that detect.
type Detection struct {
	IsOn    bool     // the file has the section
	Enable  []string // built-in rules that are off unless a file enables them
	Disable []string // built-in rules
	Kill    []string // built-in rules that end the process
	Stop    []string // built-in rules that stop the process
	Rules   []rule.Rule
	Denials []Rule // the kernel's part of the Rules with the action deny
}

// Active returns the rules that are on, the file's own last.
func (d Detection) Active() (all []rule.Rule) {
	if !d.IsOn {
		return nil
	}
	for _, r := range rule.Builtin() {
		if slices.Contains(d.Disable, r.Name) || r.IsOff && !slices.Contains(d.Enable, r.Name) {
			continue
		}
		switch {
		case slices.Contains(d.Kill, r.Name):
			r.Action = rule.Kill
		case slices.Contains(d.Stop, r.Name):
			r.Action = rule.Stop
		}
		all = append(all, r)
	}
	return append(all, d.Rules...)
}

type detectEntry struct {
	config.Mark `json:"-"`
	Enable      config.Many[config.Text] `json:"enable,omitempty" doc:"Built-in rules to switch on that are off by default, because harmless programs set them off, too. shunt guard rules lists them." min:"1" max:"63" example:"[temporary-exec]"`
	Disable     config.Many[config.Text] `json:"disable,omitempty" doc:"Built-in rules to switch off." min:"1" max:"63" example:"[bpf-load]"`
	Kill        config.Many[config.Text] `json:"kill,omitempty" doc:"Built-in rules that also end the process, as soon as the event is read. The process's actions until then are not undone." min:"1" max:"63" example:"[reverse-shell]"`
	Stop        config.Many[config.Text] `json:"stop,omitempty" doc:"Built-in rules that also stop the process (SIGSTOP), for a person to look at." min:"1" max:"63" example:"[memory-write]"`
	Rules       config.List[detectRule]  `json:"rules,omitempty" doc:"Rules of your own." example:"[{name: nc, on: exec, if: process.name == 'nc', severity: low, action: log}]"`
}

type detectRule struct {
	config.Mark `json:"-"`
	Name        config.Text              `json:"name" doc:"The rule's name in alerts." min:"1" max:"63" example:"nc"`
	On          config.Many[config.Word] `json:"on" doc:"Types of events. exec: a program is executed; connect: a TCP connection begins; accept: a TCP connection is accepted; dup: a socket becomes descriptor 0, 1 or 2; open: a file is opened for writing, or a file that not everybody may read is opened; setuid: a process changes its user; module: a kernel module is loaded; bpf: a BPF program is loaded; ptrace: a debugger takes control, or writes; mount; memfd: a file without a name is made." enum:"exec|connect|accept|dup|open|setuid|module|bpf|ptrace|mount|memfd" example:"[exec]"`
	If          config.Phrase            `json:"if" doc:"The condition, in a part of CEL: fields, texts, numbers, lists, == != < <= > >= in && || !, startsWith, endsWith, contains, matches, size, exists and all. shunt guard fields lists the fields." min:"1" max:"4096" example:"process.name == 'nc' && process.args.exists(a, a == '-e')"`
	Severity    config.Word              `json:"severity,omitempty" doc:"The severity of the alert." enum:"low|medium|high|critical" default:"medium" example:"high"`
	Mitre       config.Many[config.Text] `json:"mitre,omitempty" doc:"Techniques of MITRE ATT&CK." min:"1" max:"9" example:"[T1059.004]"`
	Action      config.Word              `json:"action,omitempty" doc:"log: report the event; alert: report it as an alert; kill: also end the process, as soon as the event is read; stop: also stop it (SIGSTOP); deny: make the kernel refuse the operation beforehand, which is possible for exec of a process.program, open of a file.path, mount, module, bpf and ptrace, each for all programs, for some (process.program ==) or for all except some (!=)." enum:"log|alert|kill|stop|deny" default:"alert" example:"alert"`
	Tell        config.Phrase            `json:"tell,omitempty" doc:"The text of an alert, with fields in braces. Default: the rule's name." min:"1" max:"1024" example:"'{process.program} was started by {parent.name}'"`
}

// detection checks the meaning of the section.
func (e *detectEntry) detection(faults *config.Faults) (d Detection) {
	d.IsOn = e.Set
	builtin := rule.Builtin()
	d.Enable, d.Disable = names(e.Enable, builtin, faults), names(e.Disable, builtin, faults)
	d.Kill, d.Stop = names(e.Kill, builtin, faults), names(e.Stop, builtin, faults)
	conflict := func(list config.Many[config.Text], other []string, key string) {
		for _, item := range list.Items {
			if slices.Contains(other, item.Value) {
				faults.Errorf(item.Mark, "remove it from one of them", "%s is under %s too", item.Value, key)
			}
		}
	}
	conflict(e.Kill, d.Disable, "disable")
	conflict(e.Stop, d.Disable, "disable")
	conflict(e.Stop, d.Kill, "kill")
	conflict(e.Enable, d.Disable, "disable")
	for _, item := range slices.Concat(e.Kill.Items, e.Stop.Items) {
		if i := index(builtin, item.Value); i >= 0 && builtin[i].IsOff && !slices.Contains(d.Enable, item.Value) {
			faults.Errorf(item.Mark, "write it under enable, too", "the rule %s is off by default", item.Value)
		}
	}
	taken := map[string]bool{}
	for i := range e.Rules.Items {
		one := &e.Rules.Items[i]
		switch name := one.Name.Value; {
		case name != "" && index(builtin, name) >= 0:
			faults.Errorf(one.Name.Mark, "choose another name", "a built-in rule has the name %q", name)
		case name != "" && taken[name]:
			faults.Errorf(one.Name.Mark, "give each rule a name of its own", "an earlier rule has the name %q, too", name)
		}
		taken[one.Name.Value] = true
		r, ok := one.rule(faults)
		if !ok {
			continue
		}
		if r.Action == rule.Deny {
			denial, is := one.denial(r, faults)
			if !is {
				continue
			}
			d.Denials = append(d.Denials, denial)
		}
		d.Rules = append(d.Rules, r)
	}
	return d
}

func index(all []rule.Rule, name string) int {
	return slices.IndexFunc(all, func(r rule.Rule) bool { return r.Name == name })
}

// names returns the built-in rules in a list.
func names(list config.Many[config.Text], builtin []rule.Rule, faults *config.Faults) (all []string) {
	for _, item := range list.Items {
		switch {
		case item.Value == "": // it is faulty already
		case index(builtin, item.Value) < 0:
			var known []string
			for _, r := range builtin {
				known = append(known, r.Name)
			}
			suggestion := "`shunt guard rules` lists them"
			if near := config.Nearest(item.Value, known); near != "" {
				suggestion = fmt.Sprintf("did you mean %q?", near)
			}
			faults.Errorf(item.Mark, suggestion, "there is no built-in rule %q", item.Value)
		default:
			all = append(all, item.Value)
		}
	}
	return all
}

func (e *detectRule) rule(faults *config.Faults) (r rule.Rule, ok bool) {
	r = rule.Rule{Name: e.Name.Value, If: e.If.Value, Severity: e.Severity.Value, Action: e.Action.Value, Tell: e.Tell.Value, Doc: e.Name.Value}
	for _, word := range e.On.Items {
		if word.Value != "" && !slices.Contains(r.On, word.Value) {
			r.On = append(r.On, word.Value)
		}
	}
	for _, id := range e.Mitre.Items {
		if id.Value != "" && rule.Technique(id.Value) == "" {
			faults.Errorf(id.Mark, rule.SuggestTechnique(id.Value), "%q is not a technique of MITRE ATT&CK for Linux", id.Value)
		}
		r.Mitre = append(r.Mitre, id.Value)
	}
	if len(r.On) == 0 || r.If == "" { // they are faulty already
		return r, false
	}
	inText, err := r.Prepare()
	var problem *rule.Problem
	if !errors.As(err, &problem) {
		return r, err == nil
	}
	at, what := e.If.Mark, "condition"
	if inText {
		at, what = e.Tell.Mark, "text"
	}
	faults.Errorf(at, problem.Suggestion, "the %s, column %d: %s", what, problem.Column, problem.Message)
	return r, false
}

// yaml returns the section as a file has it.
func (d Detection) yaml() string {
	if !d.IsOn {
		return ""
	}
	var b strings.Builder
	for _, one := range []struct {
		key   string
		names []string
	}{{"enable", d.Enable}, {"disable", d.Disable}, {"kill", d.Kill}, {"stop", d.Stop}} {
		if len(one.names) > 0 {
			fmt.Fprintf(&b, "    %s: %s\n", one.key, list(one.names))
		}
	}
	if len(d.Rules) > 0 {
		b.WriteString("    rules:\n")
	}
	for _, r := range d.Rules {
		fmt.Fprintf(&b, "      - name: %s\n        on: %s\n        if: %s\n        severity: %s\n        action: %s\n", quote(r.Name), list(r.On), quote(r.If), r.Severity, r.Action)
		if len(r.Mitre) > 0 {
			fmt.Fprintf(&b, "        mitre: %s\n", list(r.Mitre))
		}
		if r.Tell != "" {
			fmt.Fprintf(&b, "        tell: %s\n", quote(r.Tell))
		}
	}
	if b.Len() == 0 {
		return "  detect: {}\n"
	}
	return "  detect:\n" + b.String()
}
