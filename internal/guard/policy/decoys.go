package policy

import (
	"fmt"
	"path"
	"strings"

	"github.com/shunt-lb/shunt/internal/config"
)

// Decoys asks for decoys in folders: files that nobody has a reason to change.
type Decoys struct {
	Folders []string // absolute and clean
	Depth   int      // 0: these only; 1: also the folders in them; and so on
	Action  string   // log, alert, stop or kill of rule
	Trust   []string // programs, absolute and clean
	At      string   // its position in the file: FILE:LINE
}

type decoyEntry struct {
	config.Mark `json:"-"`
	Folders     config.Many[config.Phrase] `json:"folders" doc:"Folders that get decoys: files that nobody has a reason to change." min:"1" max:"4095" example:"[/srv/data, /home]"`
	Depth       config.Number              `json:"depth,omitempty" doc:"How many levels of folders below these folders get decoys, too. 0: none." min:"0" max:"8" default:"2" example:"3"`
	Action      config.Word                `json:"action,omitempty" doc:"What shunt does with a process that treats decoys as an encryptor does. log: note it; alert: report it as an alert; stop: also stop it and the processes that belong to it (SIGSTOP), until shunt guard decoys release or kill; kill: end them." enum:"log|alert|stop|kill" default:"stop" example:"alert"`
	Trust       decoyTrustEntry            `json:"trust,omitempty" doc:"The programs that may do it all the same." example:"{programs: [/usr/bin/restic]}"`
}

type decoyTrustEntry struct {
	config.Mark `json:"-"`
	Programs    config.Many[config.Phrase] `json:"programs,omitempty" doc:"Executables whose processes may change decoys, such as the program that restores backups. A copy is another program." min:"1" max:"4095" example:"[/usr/bin/restic]"`
}

// decoys checks the meaning of a part of the section. taken has the folders of earlier parts.
func (e *decoyEntry) decoys(taken map[string]bool, faults *config.Faults) Decoys {
	d := Decoys{Depth: int(e.Depth.Value), Action: e.Action.Value, At: e.At.String()}
	var others []config.Phrase
	for _, item := range e.Folders.Items {
		if path.Clean(item.Value) == "/" {
			faults.Errorf(item.Mark, "name folders with files of yours", "the root is no folder for decoys: programs of the system do not expect them")
			continue
		}
		others = append(others, item)
	}
	for _, folder := range paths(others, faults) {
		if taken[folder] {
			faults.Errorf(e.Folders.Mark, "name it in one of them", "%s is in an earlier part of decoys, too", folder)
		}
		taken[folder] = true
		d.Folders = append(d.Folders, folder)
	}
	for _, item := range e.Trust.Programs.Items {
		if strings.Contains(item.Value, digestMark) {
			faults.Errorf(item.Mark, "leave it out", "decoys do not check a program's digest")
		} else if Interprets(item.Value) {
			faults.Warnf(item.Mark, "name a program with one task", "%s runs any script: an intruder's scripts could then change decoys, too", item.Value)
		}
	}
	d.Trust = paths(e.Trust.Programs.Items, faults)
	return d
}

// String returns the part as one line for people.
func (d Decoys) String() string {
	trusted := nobody
	if len(d.Trust) > 0 {
		trusted = strings.Join(d.Trust, ", ")
	}
	where := strings.Join(d.Folders, ", ")
	if d.Depth > 0 {
		where += fmt.Sprintf(" and %d deep in them", d.Depth)
	}
	return fmt.Sprintf("%s programs that encrypt, by decoys in %s; trusting %s", d.Action, where, trusted)
}

// yaml returns the part as a file has it.
func (d Decoys) yaml() string {
	text := fmt.Sprintf("    - folders: %s\n      depth: %d\n      action: %s\n", list(d.Folders), d.Depth, d.Action)
	if len(d.Trust) > 0 {
		text += fmt.Sprintf("      trust: {programs: %s}\n", list(d.Trust))
	}
	return text
}

// IsEmpty reports whether the policy asks for nothing.
func (p Policy) IsEmpty() bool {
	return len(p.Rules) == 0 && len(p.Connections) == 0 && !p.Detection.IsOn && len(p.Decoys) == 0
}

// Watches reports whether the policy asks for more than protection.
func (p Policy) Watches() bool {
	return len(p.Connections) > 0 || p.Detection.IsOn || len(p.Decoys) > 0
}
