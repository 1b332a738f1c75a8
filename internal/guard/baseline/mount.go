package baseline

import (
	"fmt"
	"strings"
)

const fstab = "/etc/fstab"

// mount is a demand on the options of a file system in fstab(5).
type mount struct {
	Path    string
	Options []string
}

func (c *mount) wanted() string {
	return fmt.Sprintf("%s is mounted with %s", c.Path, strings.Join(c.Options, ", "))
}

// find returns the last line for the path, and its options.
func (c *mount) find(t *tree) (line int, options string, ok bool, err error) {
	content, _, err := t.read(fstab)
	for i, text := range strings.Split(string(content), "\n") {
		words := strings.FieldsFunc(text, func(r rune) bool { return r == ' ' || r == '\t' })
		if len(words) >= 4 && !strings.HasPrefix(words[0], "#") && words[1] == c.Path {
			line, options, ok = i, words[3], true
		}
	}
	return line, options, ok, err
}

func (c *mount) lacking(options string) (all []string) {
	have := strings.Split(options, ",")
	for _, option := range c.Options {
		on := false // the last word about it counts
		for _, one := range have {
			on = one == option || on && one != "defaults" && one != strings.TrimPrefix(option, "no")
		}
		if !on {
			all = append(all, option)
		}
	}
	return all
}

func (c *mount) examine(t *tree) finding {
	line, options, ok, err := c.find(t)
	switch {
	case err != nil:
		return unknown(err)
	case !ok:
		return notApplicable("%s has no line for %s", fstab, c.Path)
	}
	if lacking := c.lacking(options); len(lacking) > 0 {
		return fails("%s has %s, without %s (%s:%d)", c.Path, options, strings.Join(lacking, ", "), fstab, line+1)
	}
	return passes("%s has %s (%s:%d)", c.Path, options, fstab, line+1)
}

func (c *mount) repair(t *tree) error {
	line, options, ok, err := c.find(t)
	if err != nil || !ok {
		return err
	}
	return editLine(t, fstab, line, func(text string) string {
		rest, done := text, ""
		for range 3 { // device, path, type
			trimmed := strings.TrimLeft(rest, " \t")
			end := strings.IndexAny(trimmed, " \t")
			end += len(rest) - len(trimmed)
			done, rest = done+rest[:end], rest[end:]
		}
		return done + strings.Replace(rest, options, options+","+strings.Join(c.lacking(options), ","), 1)
	})
}
