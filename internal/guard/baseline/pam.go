package baseline

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
)

// pamIncludesMax limits the nesting of @include and include.
const pamIncludesMax = 8

// pamLine is a rule of pam.d(5).
type pamLine struct {
	file      string
	line      int
	folder    string // type: auth, account, password, session
	control   string
	module    string
	options   []string
	continued bool // the rule goes over several lines
}

// pam is a demand on a module in the stack of a service.
type pam struct {
	Service string
	Type    string
	Module  string
	Control []string // one of these
	Has     []string // options
	Without []string // options
	Option  string   // with a number
	Min     *int64
	Write   string // value of the option that the repair writes
	Add     string // line that the repair adds
}

func (c *pam) wanted() string {
	var all []string
	if len(c.Control) > 0 {
		all = append(all, strings.Join(c.Control, " or "))
	}
	all = append(all, c.Module)
	all = append(all, c.Has...)
	if c.Option != "" {
		all = append(all, fmt.Sprintf("%s=%d or more", c.Option, *c.Min))
	}
	if len(c.Without) > 0 {
		all = append(all, "without "+strings.Join(c.Without, ", "))
	}
	return fmt.Sprintf("%s of %s: %s", c.Type, c.Service, strings.Join(all, " "))
}

// needed reports whether the stack needs the module.
func (c *pam) needed() bool { return len(c.Control)+len(c.Has) > 0 || c.Option != "" }

// pamWords splits a line; text in square brackets is one word.
func pamWords(line string) (words []string) {
	line, _, _ = strings.Cut(line, "#")
	for line = strings.TrimSpace(line); line != ""; line = strings.TrimSpace(line) {
		end := strings.IndexAny(line, " \t")
		if line[0] == '[' {
			end = strings.IndexByte(line, ']') + 1
		}
		if end <= 0 {
			end = len(line)
		}
		words, line = append(words, line[:end]), line[end:]
	}
	return words
}

// stack returns the rules of a service in their order.
func (c *pam) stack(t *tree, file string, depth int) (all []pamLine, err error) {
	if depth > pamIncludesMax {
		return nil, fmt.Errorf("read %s: more than %d files include each other", file, pamIncludesMax)
	}
	content, where, err := t.read(file)
	if err != nil || content == nil {
		return nil, err
	}
	lines := strings.Split(string(content), "\n")
	for i := 0; i < len(lines); i++ {
		p, text := pamLine{file: where, line: i}, lines[i]
		for strings.HasSuffix(text, `\`) && i+1 < len(lines) {
			i++
			text, p.continued = strings.TrimSuffix(text, `\`)+" "+lines[i], true
		}
		words := pamWords(text)
		included := ""
		if len(words) == 2 && words[0] == "@include" {
			included = words[1]
		}
		if len(words) >= 3 {
			p.folder, p.control, p.module, p.options = strings.ToLower(strings.TrimPrefix(words[0], "-")), words[1], path.Base(words[2]), words[3:]
			if p.folder != c.Type {
				continue
			}
			if p.control == "include" || p.control == "substack" {
				included = words[2]
			}
		}
		if included != "" {
			below, err := c.stack(t, path.Join("/etc/pam.d", included), depth+1)
			if err != nil {
				return nil, err
			}
			if all = append(all, below...); len(all) > sshdFilesMax {
				return nil, fmt.Errorf("read %s: more than %d rules", file, sshdFilesMax)
			}
			continue
		}
		if p.module != "" {
			all = append(all, p)
		}
	}
	return all, nil
}

// lacks describes the part that a rule lacks; "" if it lacks none.
func (c *pam) lacks(p pamLine) string {
	if len(c.Control) > 0 && !slices.Contains(c.Control, p.control) {
		return "control " + p.control
	}
	for _, option := range c.Without {
		if slices.Contains(p.options, option) {
			return "option " + option
		}
	}
	for _, option := range c.Has {
		if !slices.Contains(p.options, option) {
			return "no option " + option
		}
	}
	if c.Option != "" {
		value := ""
		for _, option := range p.options {
			if key, text, is := strings.Cut(option, "="); is && key == c.Option {
				value = text
			}
		}
		if n, err := strconv.ParseInt(value, 10, 64); err != nil || n < *c.Min {
			return fmt.Sprintf("%s=%s", c.Option, value)
		}
	}
	return ""
}

func (c *pam) lines(t *tree) (with []pamLine, all []pamLine, err error) {
	all, err = c.stack(t, path.Join("/etc/pam.d", c.Service), 0)
	for _, p := range all {
		if p.module == c.Module {
			with = append(with, p)
		}
	}
	return with, all, err
}

func (c *pam) examine(t *tree) finding {
	with, all, err := c.lines(t)
	switch {
	case err != nil:
		return unknown(err)
	case len(all) == 0:
		return notApplicable("/etc/pam.d/%s has no rule for %s", c.Service, c.Type)
	case len(with) == 0 && c.needed():
		return fails("no rule for %s has %s", c.Type, c.Module)
	case len(with) == 0:
		return passes("no rule for %s has %s", c.Type, c.Module)
	}
	for _, p := range with {
		if lack := c.lacks(p); lack != "" {
			return fails("%s: %s (%s:%d)", c.Module, lack, p.file, p.line+1)
		}
	}
	return passes("%s (%s:%d)", c.Module, with[0].file, with[0].line+1)
}

func (c *pam) repair(t *tree) error {
	with, all, err := c.lines(t)
	if err != nil {
		return err
	}
	if len(with) == 0 {
		return c.insert(t, all)
	}
	for _, p := range with {
		switch {
		case c.lacks(p) == "":
			continue
		case p.continued:
			return fmt.Errorf("the rule goes over several lines: change %s:%d yourself", p.file, p.line+1)
		case len(c.Control) > 0 && !slices.Contains(c.Control, p.control):
			return fmt.Errorf("another control changes which later rules count: change %s:%d yourself", p.file, p.line+1)
		}
		if err := editLine(t, p.file, p.line, c.edited); err != nil {
			return err
		}
	}
	return nil
}

// edited returns the line with the demanded options, and otherwise unchanged.
func (c *pam) edited(line string) string {
	text, comment, commented := strings.Cut(line, "#")
	for _, option := range c.Without {
		for i := strings.Index(text, option); i > 0; i = next(text, option, i) {
			end := i + len(option)
			if strings.ContainsRune(" \t", rune(text[i-1])) && (end == len(text) || strings.ContainsRune(" \t\r", rune(text[end]))) {
				text = text[:i-1] + text[end:]
				i--
			}
		}
	}
	text = strings.TrimRight(text, " \t\r")
	if c.Option != "" {
		words := pamWords(text)
		for _, word := range words[min(3, len(words)):] {
			if strings.HasPrefix(word, c.Option+"=") {
				text = strings.Replace(text, " "+word, "", 1)
				text = strings.Replace(text, "\t"+word, "", 1)
			}
		}
		text += " " + c.Option + "=" + c.Write
	}
	for _, option := range c.Has {
		if !slices.Contains(pamWords(text), option) {
			text += " " + option
		}
	}
	if commented {
		text += " #" + comment
	}
	return text
}

// next returns the position of a text after another position; -1 if there is none.
func next(text, what string, behind int) int {
	if behind+1 >= len(text) {
		return -1
	}
	if i := strings.Index(text[behind+1:], what); i >= 0 {
		return behind + 1 + i
	}
	return -1
}

// insert adds the rule before the first rule of its type: jumps over rules (success=1) count from rules after it.
func (c *pam) insert(t *tree, all []pamLine) error {
	if c.Add == "" || len(all) == 0 {
		return fmt.Errorf("add %s to /etc/pam.d/%s yourself: its position depends on the other rules", c.Module, c.Service)
	}
	modules, err := t.glob("/usr/lib/*/security/" + c.Module)
	if err != nil {
		return err
	}
	if len(modules) == 0 {
		return fmt.Errorf("%s is not installed, and a rule with it would refuse every login: install its package first", c.Module)
	}
	content, _, err := t.read(all[0].file)
	if err != nil {
		return err
	}
	lines := strings.Split(string(content), "\n")
	at := all[0].line
	lines = append(lines[:at], append([]string{c.Add}, lines[at:]...)...)
	return t.write(all[0].file, []byte(strings.Join(lines, "\n")), 0o644)
}
