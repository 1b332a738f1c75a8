package baseline

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// mode is a demand on the permissions of files and folders.
type mode struct {
	Paths  []string // patterns
	AtMost uint32
	Owner  string
	Groups []string // one of them is the group; a repair writes the first
}

func (c *mode) wanted() string {
	return fmt.Sprintf("%s: mode %04o or less, owner %s, group %s", strings.Join(c.Paths, ", "), c.AtMost, c.Owner, strings.Join(c.Groups, " or "))
}

func (c *mode) files(t *tree) (all []string, err error) {
	for _, pattern := range c.Paths {
		found, err := t.glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, name := range found {
			where, err := t.resolve(name)
			if err != nil {
				return nil, err
			}
			if !slices.Contains(all, where) {
				all = append(all, where)
			}
		}
	}
	return all, nil
}

// numbers returns the numbers of the owner and the groups, from the tree's own files; root is 0.
func (c *mode) numbers(t *tree) (owner int, groups []int, err error) {
	if owner, err = numberIn(t, passwdFile, c.Owner); err != nil {
		return 0, nil, err
	}
	for _, group := range c.Groups {
		if number, err := numberIn(t, groupFile, group); err == nil {
			groups = append(groups, number)
		}
	}
	if len(groups) == 0 {
		return 0, nil, fmt.Errorf("%s has no group %s", groupFile, strings.Join(c.Groups, " or "))
	}
	return owner, groups, nil
}

func numberIn(t *tree, file, name string) (int, error) {
	if name == "root" {
		return 0, nil
	}
	content, _, err := t.read(file)
	if err != nil {
		return 0, err
	}
	for _, line := range strings.Split(string(content), "\n") {
		if fields := strings.Split(line, ":"); len(fields) > 2 && fields[0] == name {
			if number, err := strconv.ParseUint(fields[2], 10, 31); err == nil {
				return int(number), nil
			}
		}
	}
	return 0, fmt.Errorf("%s has no %s", file, name)
}

func (c *mode) examine(t *tree) finding {
	files, err := c.files(t)
	if err != nil {
		return unknown(err)
	}
	if len(files) == 0 {
		return notApplicable("there is no %s", strings.Join(c.Paths, ", "))
	}
	owner, groups, err := c.numbers(t)
	if err != nil {
		return unknown(err)
	}
	for _, where := range files {
		s, err := t.at(where)
		if err != nil || s == nil {
			return unknown(fmt.Errorf("look at %s: %w", where, err))
		}
		if s.Mode&^c.AtMost != 0 || s.UID != owner || !slices.Contains(groups, s.GID) {
			return fails("%s has mode %04o, owner %d, group %d", where, s.Mode, s.UID, s.GID)
		}
	}
	return passes("%s", strings.Join(files[:min(3, len(files))], ", "))
}

func (c *mode) repair(t *tree) error {
	files, err := c.files(t)
	if err != nil {
		return err
	}
	owner, groups, err := c.numbers(t)
	if err != nil {
		return err
	}
	for _, where := range files {
		s, err := t.at(where)
		if err != nil || s == nil {
			return fmt.Errorf("look at %s: %w", where, err)
		}
		after := *s
		after.Mode, after.UID = s.Mode&c.AtMost, owner
		if !slices.Contains(groups, s.GID) {
			after.GID = groups[0]
		}
		if after.Mode != s.Mode || after.UID != s.UID || after.GID != s.GID {
			t.plan(where, &after)
		}
	}
	return nil
}

// line is a line that some file must have, or that no file may have. Comments do not count.
type line struct {
	Files  []string // patterns
	Match  *regexp.Regexp
	Forbid *regexp.Regexp
	Into   string
	Add    string
	Mode   uint32 // of a file that the repair makes
}

func (c *line) wanted() string {
	if c.Forbid != nil {
		return fmt.Sprintf("no line of %s matches %s", strings.Join(c.Files, ", "), c.Forbid)
	}
	return fmt.Sprintf("a line of %s matches %s", strings.Join(c.Files, ", "), c.Match)
}

func (c *line) examine(t *tree) finding {
	matched := ""
	for _, pattern := range c.Files {
		files, err := t.glob(pattern)
		if err != nil {
			return unknown(err)
		}
		for _, file := range files {
			content, where, err := t.read(file)
			if err != nil {
				return unknown(err)
			}
			for i, text := range strings.Split(string(content), "\n") {
				text = strings.TrimSpace(text)
				if text == "" || text[0] == '#' {
					continue
				}
				if c.Forbid != nil && c.Forbid.MatchString(text) {
					return fails("%s (%s:%d)", text, where, i+1)
				}
				if c.Match != nil && matched == "" && c.Match.MatchString(text) {
					matched = fmt.Sprintf("%s (%s:%d)", text, where, i+1)
				}
			}
		}
	}
	if c.Match != nil && matched == "" {
		return fails("no line matches")
	}
	if c.Match == nil {
		return passes("no line matches")
	}
	return passes("%s", matched)
}

func (c *line) repair(t *tree) error {
	if c.Forbid != nil || c.Add == "" {
		return fmt.Errorf("somebody may have added the line for a reason: change it yourself")
	}
	content, _, err := t.read(c.Into)
	if err != nil {
		return err
	}
	var lines []string
	if len(content) > 0 {
		lines = linesOf(content)
	}
	return t.write(c.Into, bytesOf(append(lines, c.Add)), c.Mode)
}

// absent is a demand that files do not exist.
type absent struct{ Paths []string }

func (c *absent) wanted() string { return "there is no " + strings.Join(c.Paths, ", ") }

// found returns the files by their own names: a link is removed, and not the file that it leads to.
func (c *absent) found(t *tree) (all []string, err error) {
	for _, pattern := range c.Paths {
		folders, err := t.glob(path.Dir(pattern))
		if err != nil {
			return nil, err
		}
		for _, folder := range folders {
			where, err := t.resolve(folder)
			if err != nil {
				return nil, err
			}
			s, err := t.at(path.Join(where, path.Base(pattern)))
			if err != nil {
				return nil, err
			}
			if s != nil && !slices.Contains(all, path.Join(where, path.Base(pattern))) {
				all = append(all, path.Join(where, path.Base(pattern)))
			}
		}
	}
	return all, nil
}

func (c *absent) examine(t *tree) finding {
	found, err := c.found(t)
	switch {
	case err != nil:
		return unknown(err)
	case len(found) > 0:
		return fails("there is %s", strings.Join(found, ", "))
	}
	return passes("there is none")
}

func (c *absent) repair(t *tree) error {
	found, err := c.found(t)
	if err != nil {
		return err
	}
	for _, where := range found {
		s, err := t.at(where)
		if err != nil {
			return err
		}
		if s == nil || s.Kind != kindFile && s.Kind != kindLink {
			return fmt.Errorf("%s is neither a file nor a link: remove it yourself", where)
		}
		if s.Kind == kindFile {
			if _, _, err := t.read(where); err != nil { // a file that cannot be kept cannot be restored
				return err
			}
		}
		if s.Names > 1 {
			return fmt.Errorf("%s has %d names (hard links): remove it yourself", where, s.Names)
		}
		t.plan(where, nil)
	}
	return nil
}
