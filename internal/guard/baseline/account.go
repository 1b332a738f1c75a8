package baseline

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

const (
	passwdFile = "/etc/passwd"
	shadowFile = "/etc/shadow"
	groupFile  = "/etc/group"
)

// The rules for accounts.
const (
	ruleNoEmptyPassword = "no-empty-password"
	ruleShadowed        = "passwords-in-shadow"
	ruleOneRoot         = "only-root-has-uid-0"
	ruleRootGroup       = "root-has-gid-0"
	ruleUniqueUID       = "unique-uids"
	ruleUniqueName      = "unique-names"
	ruleUniqueGID       = "unique-gids"
	ruleUniqueGroup     = "unique-groups"
	ruleGroupsExist     = "groups-exist"
	ruleSystemShells    = "system-accounts-without-shell"
	ruleStrongHash      = "strong-hashes"
	ruleNoLegacy        = "no-network-entries"
	ruleShadowGroup     = "shadow-group-empty"
	ruleExpires         = "passwords-expire"
)

// accounts is a rule for the entries of passwd(5), shadow(5) and group(5).
type accounts struct {
	Rule string
	Max  int64 // of passwords-expire: days
}

// ruleAbout has the demand of each rule, and the file that it reads.
var ruleAbout = map[string]struct{ file, wanted string }{
	ruleNoEmptyPassword: {shadowFile, "no account has an empty password"},
	ruleShadowed:        {passwdFile, "the second field of every account is x"},
	ruleOneRoot:         {passwdFile, "only root has the user id 0"},
	ruleRootGroup:       {passwdFile, "root has the group id 0"},
	ruleUniqueUID:       {passwdFile, "no two accounts have the same user id"},
	ruleUniqueName:      {passwdFile, "no two accounts have the same name"},
	ruleUniqueGID:       {groupFile, "no two groups have the same id"},
	ruleUniqueGroup:     {groupFile, "no two groups have the same name"},
	ruleGroupsExist:     {passwdFile, "the group of every account is in /etc/group"},
	ruleSystemShells:    {passwdFile, "accounts below user id 1000 but for root have no login shell"},
	ruleStrongHash:      {shadowFile, "passwords are hashed with yescrypt, SHA-512, SHA-256, bcrypt or scrypt"},
	ruleNoLegacy:        {passwdFile, "no entry begins with +"},
	ruleShadowGroup:     {groupFile, "the group shadow has no members"},
	ruleExpires:         {shadowFile, "passwords expire"},
}

func (c *accounts) wanted() string {
	text := ruleAbout[c.Rule].wanted
	if c.Rule == ruleExpires {
		text += fmt.Sprintf(" after at most %d days", c.Max)
	}
	return text
}

// entry is a line of a file of accounts or groups.
type entry struct {
	line   int
	fields []string
}

func (e entry) field(i int) string {
	if i < len(e.fields) {
		return e.fields[i]
	}
	return ""
}

func entriesOf(content []byte) (all []entry) {
	for i, text := range strings.Split(string(content), "\n") {
		if text = strings.TrimSuffix(text, "\r"); text != "" && text[0] != '#' {
			all = append(all, entry{i, strings.Split(text, ":")})
		}
	}
	return all
}

// wrong returns the entries that break the rule, and the file that they are in.
func (c *accounts) wrong(t *tree) (all []entry, err error) {
	content, _, err := t.read(ruleAbout[c.Rule].file)
	if err != nil {
		return nil, err
	}
	if content == nil {
		return nil, fmt.Errorf("there is no %s", ruleAbout[c.Rule].file)
	}
	groups := map[string]bool{}
	if c.Rule == ruleGroupsExist {
		text, _, err := t.read(groupFile)
		if err != nil {
			return nil, err
		}
		for _, e := range entriesOf(text) {
			groups[e.field(2)] = true
		}
	}
	seen := map[string]bool{}
	for _, e := range entriesOf(content) {
		if strings.HasPrefix(e.field(0), "+") == (c.Rule != ruleNoLegacy) {
			continue
		}
		if c.breaks(e, seen, groups) {
			all = append(all, e)
		}
	}
	return all, nil
}

func (c *accounts) breaks(e entry, seen, groups map[string]bool) bool {
	twice := func(key string) bool {
		was := seen[key]
		seen[key] = true
		return was
	}
	hash, hasPassword := e.field(1), strings.HasPrefix(e.field(1), "$") || len(e.field(1)) == 13
	switch c.Rule {
	case ruleNoEmptyPassword:
		return hash == ""
	case ruleShadowed:
		return hash != "x"
	case ruleOneRoot:
		uid, err := strconv.ParseUint(e.field(2), 10, 32)
		return err == nil && uid == 0 && e.field(0) != "root"
	case ruleRootGroup:
		return e.field(0) == "root" && e.field(3) != "0"
	case ruleUniqueUID, ruleUniqueGID:
		return twice(strings.TrimLeft(e.field(2), "0") + ".")
	case ruleUniqueName, ruleUniqueGroup:
		return twice(e.field(0))
	case ruleGroupsExist:
		return !groups[e.field(3)]
	case ruleSystemShells:
		uid, err := strconv.ParseUint(e.field(2), 10, 32)
		return err == nil && uid > 0 && uid < 1000 && !slices.Contains([]string{"/usr/sbin/nologin", "/sbin/nologin", "/bin/false", "/usr/bin/false", "/bin/sync"}, e.field(6))
	case ruleStrongHash:
		return hasPassword && !slices.ContainsFunc([]string{"$y$", "$gy$", "$6$", "$5$", "$2a$", "$2b$", "$2y$", "$7$"}, func(one string) bool { return strings.HasPrefix(hash, one) })
	case ruleShadowGroup:
		return e.field(0) == "shadow" && e.field(3) != ""
	case ruleExpires:
		days, err := strconv.ParseInt(e.field(4), 10, 64)
		return hasPassword && (err != nil || days < 1 || days > c.Max)
	}
	return true // no-network-entries finds the entries that begin with +
}

func (c *accounts) examine(t *tree) finding {
	wrong, err := c.wrong(t)
	if err != nil {
		return unknown(err)
	}
	var names []string
	for _, e := range wrong {
		names = append(names, fmt.Sprintf("%q (line %d)", e.field(0), e.line+1))
	}
	if len(names) > 5 {
		names = append(names[:5], fmt.Sprintf("and %d more", len(names)-5))
	}
	if len(names) > 0 {
		return fails("%s: %s", ruleAbout[c.Rule].file, strings.Join(names, ", "))
	}
	return passes("%s", ruleAbout[c.Rule].file)
}

// repair changes entries for which there is one safe repair: it locks an account with an empty password, and removes a
// shell.
func (c *accounts) repair(t *tree) error {
	field, value := 0, ""
	switch c.Rule {
	case ruleNoEmptyPassword:
		field, value = 1, "!"
	case ruleSystemShells:
		field, value = 6, "/usr/sbin/nologin"
	case ruleShadowGroup:
		field = 3
	case ruleExpires: // an older password would have to be changed at the next login, or would refuse it
		return fmt.Errorf("tell the accounts' people first, then chage -M %d ACCOUNT", c.Max)
	case ruleNoLegacy:
	default:
		return fmt.Errorf("shunt cannot know which account is right: change %s yourself", ruleAbout[c.Rule].file)
	}
	wrong, err := c.wrong(t)
	if err != nil {
		return err
	}
	content, _, err := t.read(ruleAbout[c.Rule].file)
	if err != nil {
		return err
	}
	lines := strings.Split(string(content), "\n")
	for _, e := range slices.Backward(wrong) {
		if c.Rule == ruleNoLegacy {
			lines = slices.Delete(lines, e.line, e.line+1)
			continue
		}
		if field >= len(e.fields) {
			return fmt.Errorf("line %d of %s has only %d fields: change it yourself", e.line+1, ruleAbout[c.Rule].file, len(e.fields))
		}
		e.fields[field] = value
		lines[e.line] = strings.Join(e.fields, ":")
	}
	return t.write(ruleAbout[c.Rule].file, []byte(strings.Join(lines, "\n")), 0o644)
}
