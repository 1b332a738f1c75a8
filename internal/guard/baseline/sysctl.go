package baseline

import (
	"path"
	"slices"
	"strings"
)

// sysctlFolders are in the order of sysctl.d(5): if several have a file of one name, the first folder's counts. Then the files of all
// folders are read in the order of their names, and the last value counts.
var sysctlFolders = []string{"/etc/sysctl.d", "/run/sysctl.d", "/usr/local/lib/sysctl.d", "/usr/lib/sysctl.d", "/lib/sysctl.d"}

// sysctlOwn is the file in which a repair writes a parameter that no file of /etc sets. Its name sorts after 99-sysctl.conf.
const sysctlOwn = "/etc/sysctl.d/99-zz-shunt-baseline.conf"

// sysctl is a demand on a kernel parameter as the next boot sets it.
type sysctl struct {
	Key string
	demand
	Absent string // the kernel's value if no file sets the parameter; "" if that is a fault
	Write  string
}

func (c *sysctl) wanted() string { return c.Key + ": " + c.demand.String() }

// sysctlKey returns a key with dots for both spellings (sysctl.d(5): the first separator decides).
func sysctlKey(key string) string {
	key = strings.TrimPrefix(key, "-")
	if i := strings.IndexAny(key, "./"); i < 0 || key[i] == '.' {
		return key
	}
	return strings.NewReplacer("/", ".", ".", "/").Replace(key)
}

func sysctlFiles(t *tree) ([]string, error) {
	byName := map[string]string{}
	for _, folder := range sysctlFolders {
		names, err := t.list(folder)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			if _, is := byName[name]; !is && strings.HasSuffix(name, ".conf") {
				byName[name] = path.Join(folder, name)
			}
		}
	}
	names := make([]string, 0, len(byName))
	for name := range byName {
		names = append(names, name)
	}
	slices.Sort(names)
	for i, name := range names {
		names[i] = byName[name]
	}
	return names, nil
}

// effective returns the line that decides. A full key takes precedence over a pattern.
func (c *sysctl) effective(t *tree) (a assignment, ok bool, err error) {
	files, err := sysctlFiles(t)
	if err != nil {
		return a, false, err
	}
	exact, excluded := false, false
	for _, file := range files {
		content, where, err := t.read(file)
		if err != nil && where == "/dev/null" { // the file is masked
			continue
		}
		if err != nil {
			return a, false, err
		}
		for _, one := range assignmentsOf(string(content), formatEquals, "") {
			key := sysctlKey(one.key)
			one.file = where
			switch matched, _ := path.Match(strings.ReplaceAll(key, ".", "/"), strings.ReplaceAll(c.Key, ".", "/")); {
			case key == c.Key && one.value == isSet && strings.HasPrefix(one.key, "-"):
				excluded = true // -KEY alone: no pattern sets it
			case key == c.Key:
				a, ok, exact = one, true, true
			case matched && !exact && strings.ContainsAny(key, "*?["):
				a, ok = one, true
			}
		}
	}
	if excluded && !exact {
		return assignment{}, false, nil
	}
	return a, ok, nil
}

func (c *sysctl) examine(t *tree) finding {
	a, ok, err := c.effective(t)
	switch {
	case err != nil:
		return unknown(err)
	case !ok && c.Absent == "":
		return fails("no file of sysctl.d sets %s", c.Key)
	case !ok && !c.meets(c.Absent):
		return fails("no file of sysctl.d sets %s, which means %s", c.Key, c.Absent)
	case !ok:
		return passes("no file of sysctl.d sets %s, which means %s", c.Key, c.Absent)
	case !c.meets(a.value):
		return fails("%v", a)
	}
	return passes("%v", a)
}

func (c *sysctl) repair(t *tree) error {
	a, ok, err := c.effective(t)
	if err != nil {
		return err
	}
	if ok && strings.HasPrefix(a.file, "/etc/") && sysctlKey(a.key) == c.Key {
		return editLine(t, a.file, a.line, func(line string) string { return withValue(line, formatEquals, a, c.Write) })
	}
	content, _, err := t.read(sysctlOwn)
	if err != nil {
		return err
	}
	var lines []string
	if len(content) > 0 {
		lines = linesOf(content)
	}
	return t.write(sysctlOwn, bytesOf(append(lines, c.Key+" = "+c.Write)), 0o644)
}
