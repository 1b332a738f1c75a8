package baseline

import (
	"fmt"
	"path"
	"strings"
)

// The formats of files with keys and values.
const (
	formatSSHD   = "sshd"   // sshd_config(5): the first value counts, Include, Match
	formatWords  = "words"  // login.defs(5): KEY VALUE, the last counts
	formatEquals = "equals" // KEY = VALUE, perhaps below a [section]: the last counts
	formatShell  = "shell"  // KEY=VALUE as a shell reads it, perhaps exported or readonly: the last counts
)

// assignment is a line that gives a key a value.
type assignment struct {
	file  string // without links
	line  int    // from 0
	key   string
	value string
	match bool // it holds only for connections of a Match block
}

func (a assignment) String() string {
	return fmt.Sprintf("%s (%s:%d)", strings.TrimSpace(a.key+" "+a.value), a.file, a.line+1)
}

// setting is a demand on a key of a file, or of several files that are read as one.
type setting struct {
	Files   []string // patterns, in the order in which they are read
	Into    string   // file to which a line is added
	Format  string
	Section string
	Key     string
	demand
	Absent string // value if no file has the key; "" if that is a fault
	Write  string // value that the repair writes
}

func (c *setting) wanted() string { return c.Key + ": " + c.demand.String() }

// assignments returns the lines that have the key, in the order in which they are read.
func (c *setting) assignments(t *tree) (all []assignment, err error) {
	for _, pattern := range c.Files {
		files, err := t.glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			content, where, err := t.read(file)
			if err != nil {
				return nil, err
			}
			if c.Format == formatSSHD {
				r := sshdReader{tree: t, folder: path.Dir(pattern), key: c.Key}
				if err := r.file(where, content, false, 0); err != nil {
					return nil, err
				}
				all = append(all, r.found...)
				continue
			}
			for _, a := range assignmentsOf(string(content), c.Format, c.Section) {
				if strings.EqualFold(a.key, c.Key) && c.Format != formatShell || a.key == c.Key {
					a.file = where
					all = append(all, a)
				}
			}
		}
	}
	return all, nil
}

// assignmentsOf returns the keys and values of a text, for formats other than sshd's.
func assignmentsOf(text, format, section string) (all []assignment) {
	current := ""
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' || line[0] == ';' && format == formatEquals {
			continue
		}
		if format == formatEquals && line[0] == '[' && line[len(line)-1] == ']' {
			current = line[1 : len(line)-1]
			continue
		}
		if section != "" && !strings.EqualFold(section, current) {
			continue
		}
		if a, ok := assignmentOf(line, format); ok {
			a.line = i
			all = append(all, a)
		}
	}
	return all
}

func assignmentOf(line, format string) (a assignment, ok bool) {
	switch format {
	case formatWords:
		key, value, _ := cutSpace(line)
		return assignment{key: key, value: value}, true
	case formatShell:
		for _, word := range []string{"export ", "readonly ", "typeset -xr ", "declare -xr ", "declare -x "} {
			line = strings.TrimPrefix(line, word)
		}
		key, value, found := strings.Cut(line, "=")
		if !found || strings.ContainsAny(key, " \t\"'$(") {
			return a, false
		}
		if value != "" && (value[0] == '"' || value[0] == '\'') {
			value, _, _ = strings.Cut(value[1:], value[:1])
			return assignment{key: key, value: value}, true
		}
		if end := strings.IndexAny(value, "; \t"); end >= 0 {
			value = value[:end]
		}
		return assignment{key: key, value: value}, true
	}
	key, value, found := strings.Cut(line, "=")
	if !found {
		return assignment{key: strings.TrimSpace(line), value: isSet}, true
	}
	return assignment{key: strings.TrimSpace(key), value: strings.Trim(strings.TrimSpace(value), `"`)}, true
}

// isSet is the value of a key without a value, such as even_deny_root of faillock.conf(5).
const isSet = "set"

func cutSpace(s string) (before, after string, found bool) {
	if i := strings.IndexAny(s, " \t"); i >= 0 {
		return s[:i], strings.TrimSpace(s[i:]), true
	}
	return s, "", false
}

// effective returns the line whose value counts; ok is false if there is none.
func (c *setting) effective(all []assignment) (a assignment, ok bool) {
	for _, one := range all {
		if !one.match && (!ok || c.Format != formatSSHD) {
			a, ok = one, true
		}
	}
	return a, ok
}

func (c *setting) examine(t *tree) finding {
	all, err := c.assignments(t)
	if err != nil {
		return unknown(err)
	}
	a, ok := c.effective(all)
	switch {
	case !ok && c.Absent == "":
		return fails("%s is not set", c.Key)
	case !ok && !c.meets(c.Absent):
		return fails("%s is not set, which means %s", c.Key, c.Absent)
	case ok && !c.meets(a.value):
		return fails("%v", a)
	}
	for _, one := range all {
		if one.match && !c.meets(one.value) {
			return fails("%v in a Match block", one)
		}
	}
	if !ok {
		return passes("%s is not set, which means %s", c.Key, c.Absent)
	}
	return passes("%v", a)
}

func (c *setting) repair(t *tree) error {
	all, err := c.assignments(t)
	if err != nil {
		return err
	}
	for _, a := range all {
		if a.match && !c.meets(a.value) {
			return fmt.Errorf("a Match block is an exception that somebody has made on purpose: change %v yourself", a)
		}
	}
	a, ok := c.effective(all)
	value := c.repaired(a.value, c.Write)
	if value == "" {
		return fmt.Errorf("set %s yourself: the template has no value to write", c.Key)
	}
	if ok && !strings.HasPrefix(a.file, "/usr/") {
		return editLine(t, a.file, a.line, func(line string) string { return withValue(line, c.Format, a, value) })
	}
	return c.insert(t, value)
}

// withValue returns the line with another value; the text before the value stays.
func withValue(line, format string, a assignment, value string) string {
	at := strings.Index(line, a.key) + len(a.key)
	rest := line[at:]
	separator := rest[:len(rest)-len(strings.TrimLeft(rest, " \t="))]
	if value == isSet {
		separator, value = "", ""
	} else if separator == "" {
		separator = separatorOf(format)
	}
	return line[:at] + separator + value
}

func separatorOf(format string) string {
	switch format {
	case formatEquals:
		return " = "
	case formatShell:
		return "="
	}
	return " "
}

// insert adds a line at a position where it counts.
func (c *setting) insert(t *tree, value string) error {
	text := c.Key + separatorOf(c.Format) + value
	if value == isSet {
		text = c.Key
	}
	content, _, err := t.read(c.Into)
	if err != nil {
		return err
	}
	if len(content) == 0 {
		if c.Section != "" {
			text = "[" + c.Section + "]\n" + text
		}
		return t.write(c.Into, []byte(text+"\n"), 0o644)
	}
	lines := linesOf(content)
	at := len(lines)
	for i, line := range lines {
		trimmed := strings.TrimSpace(line)
		if c.Section != "" && strings.EqualFold(trimmed, "["+c.Section+"]") {
			at = i + 1
			break
		}
		if word := strings.ToLower(trimmed); c.Format == formatSSHD && strings.HasPrefix(word, "match") && len(word) > 5 && strings.ContainsRune(" \t=\"", rune(word[5])) {
			at = i
			break
		}
	}
	if c.Section != "" && at == len(lines) {
		lines = append(lines, "["+c.Section+"]")
		at++
	}
	lines = append(lines[:at], append([]string{text}, lines[at:]...)...)
	return t.write(c.Into, bytesOf(lines), 0o644)
}

// linesOf returns the lines of a text, without their ends. bytesOf gives the last line an end if it has none.
func linesOf(content []byte) []string {
	return strings.Split(strings.TrimSuffix(string(content), "\n"), "\n")
}

func bytesOf(lines []string) []byte { return []byte(strings.Join(lines, "\n") + "\n") }

// editLine plans a change of a line.
func editLine(t *tree, file string, line int, edit func(string) string) error {
	content, _, err := t.read(file)
	if err != nil {
		return err
	}
	lines := strings.Split(string(content), "\n")
	if line >= len(lines) {
		return fmt.Errorf("%s has no line %d any more", file, line+1)
	}
	lines[line] = edit(lines[line])
	return t.write(file, []byte(strings.Join(lines, "\n")), 0o644)
}
