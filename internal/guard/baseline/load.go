package baseline

import (
	"fmt"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/config"
)

// loaded is the result of build for a file.
type loaded struct{ items []Item }

var (
	ownFormat  = config.NewFormat(config.NewSection(Key, "The template with which a system is compared.", "{items: []}", buildOwn))
	userFormat = config.NewFormat(config.NewSection(Key, "The template with which a system is compared.", "{base: debian, change: [{id: ssh-max-auth-tries, max: 6}]}", build))
)

// Load reads a template: the built-in one by its name, or a file. If a fault is an error, the items must not be
// used. The error says that a file could not be read.
func Load(name string) ([]Item, []config.Fault, error) {
	if name == Debian {
		items, err := builtIn()
		return items, nil, err
	}
	contents, err := userFormat.Read(name)
	if err != nil {
		return nil, nil, err
	}
	l, _ := contents.Settings[Key].(loaded)
	return l.items, contents.Faults.Sorted(), nil
}

// Schema returns the JSON Schema of a template's file, for editors.
func Schema() []byte { return userFormat.Schema("Template of shunt guard baseline") }

// builtIn reads the template of Debian in the same way as a user's file: package config reads files, so it gets one
// that exists only in memory.
func builtIn() ([]Item, error) {
	fd, err := unix.MemfdCreate("debian.yaml", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("read the template of Debian: make a file in memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), "debian.yaml")
	defer f.Close() //nolint:errcheck // nothing is kept in it
	if _, err := f.Write(debian); err != nil {
		return nil, fmt.Errorf("read the template of Debian: %w", err)
	}
	contents, err := ownFormat.Read(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return nil, fmt.Errorf("read the template of Debian: %w; is /proc mounted?", err)
	}
	if faults := contents.Faults.Sorted(); len(faults) > 0 {
		return nil, fmt.Errorf("the template of Debian: %v", faults[0]) // a test would fail
	}
	l, _ := contents.Settings[Key].(loaded)
	return l.items, nil
}

func buildOwn(e *templateEntry, read *config.Contents) any {
	return loaded{itemsOf(e, nil, &read.Faults)}
}

func build(e *templateEntry, read *config.Contents) any {
	if !e.Set {
		if !read.Unparsed {
			read.Faults.Errorf(config.Mark{At: e.At.Whole()}, "name the changes, for example baseline: {change: [{id: ssh-max-auth-tries, max: 6}]}", "there is no key %q", Key)
		}
		return loaded{}
	}
	var items []Item
	if e.Base.Value == Debian {
		base, err := builtIn()
		if err != nil {
			read.Faults.Errorf(e.Base.Mark, "write base: none", "%v", err)
			return loaded{}
		}
		items = changed(base, e.Change.Items, &read.Faults)
	} else if len(e.Change.Items) > 0 {
		read.Faults.Errorf(e.Change.Mark, "write base: debian, or leave it out", "change needs a base")
	}
	items = itemsOf(e, items, &read.Faults)
	if len(items) == 0 && !e.Own.Bad && !e.Change.Bad && !read.Unparsed {
		read.Faults.Errorf(e.Mark, "leave an item on, or write one under items", "the template has no item")
	}
	return loaded{items}
}

// changed returns the base's items with the user's changes.
func changed(items []Item, changes []changeEntry, faults *config.Faults) []Item {
	seen := map[string]bool{}
	for i := range changes {
		c := &changes[i]
		at := slices.IndexFunc(items, func(item Item) bool { return item.ID == c.ID.Value })
		switch {
		case c.ID.Value == "": // it has a fault already
			continue
		case seen[c.ID.Value]:
			faults.Errorf(c.ID.Mark, "keep one of them", "%s is changed twice", c.ID.Value)
			continue
		case at < 0:
			var ids []string
			for _, item := range items {
				ids = append(ids, item.ID)
			}
			suggestion := ""
			if near := config.Nearest(c.ID.Value, ids); near != "" {
				suggestion = fmt.Sprintf("did you mean %q?", near)
			}
			faults.Errorf(c.ID.Mark, suggestion, "the template of Debian has no item %q", c.ID.Value)
			continue
		}
		seen[c.ID.Value] = true
		if c.Off.Value {
			items = slices.Delete(items, at, at+1)
			continue
		}
		d := demandOf(c.Is, c.Min, c.Max, c.Without, c.Covers, faults)
		switch check := items[at].check.(type) {
		case *setting:
			check.demand, check.Write = merged(check.demand, d), value(c.Write, check.Write)
			fits(c.Mark, check.demand, check.Write, faults)
		case *sysctl:
			check.demand, check.Write = merged(check.demand, d), value(c.Write, check.Write)
			fits(c.Mark, check.demand, check.Write, faults)
		case *pam:
			if c.Min.Set && check.Option != "" {
				check.Min, check.Write = d.Min, strconv.FormatUint(c.Min.Value, 10)
				continue
			}
			faults.Errorf(c.Mark, "switch it off, and write your own under items", "%s has no value that can be changed", c.ID.Value)
		case *mode:
			if c.AtMost.Set {
				check.AtMost = octal(c.AtMost, faults)
				continue
			}
			faults.Errorf(c.Mark, "write at-most", "of %s only at-most can be changed", c.ID.Value)
		default:
			faults.Errorf(c.Mark, "switch it off, and write your own under items", "%s has no value that can be changed", c.ID.Value)
		}
	}
	return items
}

func value(p config.Phrase, otherwise string) string {
	if p.Set {
		return p.Value
	}
	return otherwise
}

// merged returns a demand in which the parts of another one that are set replace its own.
func merged(old, by demand) demand {
	if by.Is != nil {
		old.Is = by.Is
	}
	if by.Min != nil {
		old.Min = by.Min
	}
	if by.Max != nil {
		old.Max = by.Max
	}
	if by.Without != nil {
		old.Without = by.Without
	}
	if by.Covers != "" {
		old.Covers = by.Covers
	}
	return old
}

// fits reports a fault if fix would write a value that check refuses.
func fits(at config.Mark, d demand, write string, faults *config.Faults) {
	if d.String() == "" {
		faults.Errorf(at, "write is, min, max, without or covers", "it names no right value")
	} else if write != "" && !d.meets(write) {
		faults.Errorf(at, "write: a value that is right", "fix would write %q, but the right value is %s", write, d)
	}
}

func demandOf(is config.Many[config.Phrase], least, most config.Number, without config.Many[config.Phrase], covers config.Phrase, faults *config.Faults) (d demand) {
	d.Is, d.Without, d.Covers = phrases(is), phrases(without), covers.Value
	number := func(n config.Number) *int64 {
		if !n.Set || n.Bad {
			return nil
		}
		v := int64(n.Value)
		return &v
	}
	d.Min, d.Max = number(least), number(most)
	if d.Min != nil && d.Max != nil && *d.Min > *d.Max {
		faults.Errorf(least.Mark, "", "min is %d, and max is %d", *d.Min, *d.Max)
	}
	if covers.Set {
		octal(covers, faults)
	}
	return d
}

func phrases(list config.Many[config.Phrase]) (all []string) {
	for _, p := range list.Items {
		all = append(all, p.Value)
	}
	return all
}

func texts(list config.Many[config.Text]) (all []string) {
	for _, p := range list.Items {
		all = append(all, p.Value)
	}
	return all
}

func octal(p config.Phrase, faults *config.Faults) uint32 {
	n, err := strconv.ParseUint(p.Value, 8, 12)
	if err != nil && p.Value != "" {
		faults.Errorf(p.Mark, "write for example \"0640\"", "%q is no permissions in octal digits", p.Value)
	}
	return uint32(n)
}

// patterns returns absolute patterns of paths.
func patterns(list config.Many[config.Phrase], faults *config.Faults) (all []string) {
	for _, p := range list.Items {
		all = append(all, pattern(p, faults))
	}
	return all
}

func pattern(p config.Phrase, faults *config.Faults) string {
	if p.Value != "" && !path.IsAbs(p.Value) {
		faults.Errorf(p.Mark, "begin it with /", "the path %q is not absolute", p.Value)
	}
	if _, err := path.Match(p.Value, ""); err != nil {
		faults.Errorf(p.Mark, "", "the pattern %q: %v", p.Value, err)
	}
	return p.Value
}

func expression(p config.Phrase, faults *config.Faults) *regexp.Regexp {
	if !p.Set || p.Bad {
		return nil
	}
	e, err := regexp.Compile(p.Value)
	if err != nil {
		faults.Errorf(p.Mark, "", "%v", err)
	}
	return e
}

// itemsOf appends a template's own items.
func itemsOf(e *templateEntry, items []Item, faults *config.Faults) []Item {
	for i := range e.Own.Items {
		entry := &e.Own.Items[i]
		if slices.ContainsFunc(items, func(item Item) bool { return item.ID == entry.ID.Value }) {
			faults.Errorf(entry.ID.Mark, "give each item an id of its own; to change one of the base, write it under change", "there is an item %q before this one", entry.ID.Value)
		}
		section := slices.IndexFunc(Sections, func(s Section) bool { return s.Word == entry.Section.Value })
		if section >= 0 && entry.Clause.Value != Sections[section].Clause && !strings.HasPrefix(entry.Clause.Value, Sections[section].Clause+" ") {
			faults.Errorf(entry.Clause.Mark, "", "the section %s is clause %s", entry.Section.Value, Sections[section].Clause)
		}
		item := Item{ID: entry.ID.Value, Title: entry.Title.Value, Section: entry.Section.Value, Clause: entry.Clause.Value, Manual: phrases(entry.Manual),
			Needs: pattern(entry.Needs, faults), ByHand: entry.ByHand.Value}
		checks := entry.checks(faults)
		if len(checks) != 1 {
			faults.Errorf(entry.Mark, "write one of setting, sysctl, mode, line, absent, packages, services, pam, mount, accounts", "it has %d checks, want one", len(checks))
			continue
		}
		item.check = checks[0]
		items = append(items, item)
	}
	return items
}

// checks returns the checks of an entry; there should be one.
func (e *itemEntry) checks(faults *config.Faults) (all []check) {
	if s := &e.Setting; s.Set {
		c := &setting{Files: patterns(s.Files, faults), Into: pattern(s.Into, faults), Format: s.Format.Value, Section: s.InSection.Value, Key: s.Key.Value,
			demand: demandOf(s.Is, s.Min, s.Max, s.Without, s.Covers, faults), Absent: s.Unset.Value, Write: s.Write.Value}
		if c.Into == "" && len(c.Files) > 0 {
			c.Into = c.Files[0]
		}
		if strings.ContainsAny(c.Into, "*?[") {
			faults.Errorf(s.Mark, "name a file with into", "fix cannot add a line to the pattern %s", c.Into)
		}
		fits(s.Mark, c.demand, c.Write, faults)
		all = append(all, c)
	}
	if s := &e.Sysctl; s.Set {
		c := &sysctl{Key: s.Key.Value, demand: demandOf(s.Is, s.Min, s.Max, s.Without, s.Covers, faults), Absent: s.Unset.Value, Write: s.Write.Value}
		fits(s.Mark, c.demand, c.Write, faults)
		all = append(all, c)
	}
	if s := &e.Mode; s.Set {
		all = append(all, &mode{Paths: patterns(s.Paths, faults), AtMost: octal(s.AtMost, faults), Owner: s.Owner.Value, Groups: texts(s.Groups)})
	}
	if s := &e.Line; s.Set {
		c := &line{Files: patterns(s.Files, faults), Match: expression(s.Match, faults), Forbid: expression(s.Forbid, faults), Into: pattern(s.Into, faults), Add: s.Add.Value, Mode: octal(s.Mode, faults)}
		if c.Match == nil && c.Forbid == nil && !s.Match.Set && !s.Forbid.Set {
			faults.Errorf(s.Mark, "write match or forbid", "it has neither match nor forbid")
		}
		if (c.Add == "") != (c.Into == "") {
			faults.Errorf(s.Mark, "write add and into, or neither", "add and into go together")
		}
		all = append(all, c)
	}
	if s := &e.Absent; s.Set {
		all = append(all, &absent{Paths: patterns(s.Paths, faults)})
	}
	if s := &e.Packages; s.Set {
		all = append(all, &software{Names: texts(s.Names), Installed: s.Wanted.Value})
	}
	if s := &e.Services; s.Set {
		all = append(all, &service{Names: texts(s.Names), Enabled: s.Wanted.Value})
	}
	if s := &e.PAM; s.Set {
		d := demandOf(config.Many[config.Phrase]{}, s.Min, config.Number{}, config.Many[config.Phrase]{}, config.Phrase{}, faults)
		c := &pam{Service: s.Service.Value, Type: s.Type.Value, Module: s.Module.Value, Control: phrases(s.Control), Has: texts(s.Has), Without: texts(s.Without),
			Option: s.Option.Value, Min: d.Min, Write: strconv.FormatUint(s.Min.Value, 10), Add: s.Add.Value}
		if (c.Option == "") != (c.Min == nil) {
			faults.Errorf(s.Mark, "write option and min, or neither", "option and min go together")
			c.Option = ""
		}
		all = append(all, c)
	}
	if s := &e.Mount; s.Set {
		all = append(all, &mount{Path: s.Path.Value, Options: texts(s.Options)})
	}
	if s := &e.Accounts; s.Set {
		if (s.Rule.Value == ruleExpires) != s.Max.Set {
			faults.Errorf(s.Mark, "", "max is of passwords-expire, which needs it")
		}
		all = append(all, &accounts{Rule: s.Rule.Value, Max: int64(s.Max.Value)})
	}
	return all
}
