package baseline

import (
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
)

const dpkgStatus = "/var/lib/dpkg/status"

// software is a demand that packages are installed, or are not, by dpkg's records.
type software struct {
	Names     []string
	Installed bool // at least one of the names is wanted; otherwise none may be installed
}

func (c *software) wanted() string {
	if c.Installed {
		return strings.Join(c.Names, " or ") + " is installed"
	}
	return "not installed: " + strings.Join(c.Names, ", ")
}

func (c *software) examine(t *tree) finding {
	content, _, err := t.read(dpkgStatus)
	if err != nil {
		return unknown(err)
	}
	if content == nil {
		return unknown(fmt.Errorf("there is no %s", dpkgStatus))
	}
	var found []string
	name := ""
	for _, text := range strings.Split(string(content), "\n") {
		if value, is := strings.CutPrefix(text, "Package: "); is {
			name = strings.TrimSpace(value)
		} else if value, is := strings.CutPrefix(text, "Status: "); is && strings.HasSuffix(strings.TrimSpace(value), " installed") && slices.Contains(c.Names, name) && !slices.Contains(found, name) {
			found = append(found, name)
		}
	}
	switch {
	case c.Installed && len(found) == 0:
		return fails("not installed: %s", strings.Join(c.Names, ", "))
	case !c.Installed && len(found) > 0:
		return fails("installed: %s", strings.Join(found, ", "))
	case len(found) > 0:
		return passes("installed: %s", strings.Join(found, ", "))
	}
	return passes("none is installed")
}

func (c *software) repair(*tree) error {
	if c.Installed {
		return fmt.Errorf("no program of the tree is run: apt-get install %s", c.Names[0])
	}
	return fmt.Errorf("no program of the tree is run: apt-get purge %s", strings.Join(c.Names, " "))
}

var unitFolders = []string{"/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"}

// service is a demand that systemd units start at boot, or do not.
type service struct {
	Names   []string
	Enabled bool // at least one of the names has to start; otherwise none may
}

func (c *service) wanted() string {
	if c.Enabled {
		return strings.Join(c.Names, " or ") + " starts at boot"
	}
	return "does not start at boot: " + strings.Join(c.Names, ", ")
}

// unit returns the file of a unit; "" if there is none. A unit is masked if it is a link to /dev/null.
func unit(t *tree, name string) (file string, masked bool, err error) {
	for _, folder := range unitFolders {
		where, err := t.resolve(folder)
		if err != nil {
			return "", false, err
		}
		s, err := t.at(path.Join(where, name))
		if err != nil {
			return "", false, err
		}
		if s != nil {
			return path.Join(where, name), s.Kind == kindLink && s.Target == "/dev/null", nil
		}
	}
	return "", false, nil
}

// starts reports whether a target or another unit wants the unit.
func starts(t *tree, name string) (bool, error) {
	for _, pattern := range []string{"*.wants", "*.requires"} {
		folders, err := t.glob(path.Join(unitFolders[0], pattern))
		if err != nil {
			return false, err
		}
		for _, folder := range folders {
			where, err := t.resolve(folder)
			if err != nil {
				return false, err
			}
			if s, err := t.at(path.Join(where, name)); err != nil || s != nil {
				return s != nil, err
			}
		}
	}
	return false, nil
}

// state returns which of the names exist, and which start at boot.
func (c *service) state(t *tree) (exist, start []string, err error) {
	for _, name := range c.Names {
		file, masked, err := unit(t, name)
		if err != nil {
			return nil, nil, err
		}
		if file == "" {
			continue
		}
		exist = append(exist, name)
		on, err := starts(t, name)
		if err != nil {
			return nil, nil, err
		}
		if on && !masked {
			start = append(start, name)
		}
	}
	return exist, start, nil
}

func (c *service) examine(t *tree) finding {
	exist, start, err := c.state(t)
	switch {
	case err != nil:
		return unknown(err)
	case c.Enabled && len(exist) == 0:
		return fails("there is no unit %s", strings.Join(c.Names, ", "))
	case c.Enabled && len(start) == 0:
		return fails("%s does not start", exist[0])
	case !c.Enabled && len(start) > 0:
		return fails("starts: %s", strings.Join(start, ", "))
	case len(start) > 0:
		return passes("starts: %s", strings.Join(start, ", "))
	}
	return passes("none starts")
}

var wantedBy = regexp.MustCompile(`(?m)^WantedBy\s*=\s*(\S+)\s*$`)

func (c *service) repair(t *tree) error {
	exist, start, err := c.state(t)
	if err != nil {
		return err
	}
	if c.Enabled {
		if len(exist) == 0 {
			return errors.New("install the package that has it")
		}
		return enable(t, exist[0])
	}
	for _, name := range start { // systemctl mask makes a link to /dev/null
		if err := t.link(path.Join(unitFolders[0], name), "/dev/null"); err != nil {
			return fmt.Errorf("mask %s: %w; disable it yourself", name, err)
		}
	}
	return nil
}

// enable makes the link that systemctl enable makes.
func enable(t *tree, name string) error {
	file, masked, err := unit(t, name)
	if err != nil {
		return err
	}
	if masked {
		return fmt.Errorf("it is masked: run systemctl unmask %s", name)
	}
	content, _, err := t.read(file)
	if err != nil {
		return err
	}
	m := wantedBy.FindSubmatch(content)
	if m == nil || strings.Contains(string(m[1]), "/") {
		return fmt.Errorf("%s says no WantedBy: enable it yourself", file)
	}
	return t.link(path.Join(unitFolders[0], string(m[1])+".wants", name), file)
}
