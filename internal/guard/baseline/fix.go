package baseline

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// change is the change of one object: its states before and after. nil: it does not exist.
type change struct {
	Path   string `json:"path"`
	Before *state `json:"before,omitempty"`
	After  *state `json:"after,omitempty"`
	Temp   string `json:"temp"` // the name of a new file before it is renamed to Path
}

// Outcome is the outcome of a repair of an item that failed.
type Outcome struct {
	ID     string   `json:"id"`
	Title  string   `json:"title"`
	Found  string   `json:"found"` // the state before
	Paths  []string `json:"paths,omitempty"`
	ByHand string   `json:"by_hand,omitempty"` // why a person has to repair it, and how
	Fixed  bool     `json:"fixed"`             // whether it passes now; false in a dry run
	Error  string   `json:"error,omitempty"`   // why a change was not made
}

// Plan is a set of planned changes.
type Plan struct {
	Outcomes []Outcome // of the items that fail
	tree     *tree
	dir      string
	items    []Item
	changes  []change
}

// NewPlan examines the items that fail, and plans their repairs in memory. only, if not empty, limits the repairs to these ids. The plan
// must be closed.
func NewPlan(dir string, items []Item, only []string) (*Plan, error) {
	for _, id := range only {
		if !slices.ContainsFunc(items, func(i Item) bool { return i.ID == id }) {
			return nil, fmt.Errorf("repair %s: the template has no such item; `shunt guard baseline check --all` lists them", id)
		}
	}
	t, err := openTree(dir)
	if err != nil {
		return nil, err
	}
	p := &Plan{tree: t, dir: dir, items: items}
	for i := range items {
		item := &items[i]
		if len(only) > 0 && !slices.Contains(only, item.ID) {
			continue
		}
		f := examineItem(t, item)
		if f.status != Fails {
			continue
		}
		o := Outcome{ID: item.ID, Title: item.Title, Found: f.found}
		before, _ := t.plans()
		if err := repairItem(t, item); err != nil {
			o.ByHand = printable(err.Error())
		} else {
			for _, where := range t.order {
				if old, was := before[where]; !was || old != t.planned[where] {
					o.Paths = append(o.Paths, where)
				}
			}
		}
		p.Outcomes = append(p.Outcomes, o)
	}
	for _, where := range t.order {
		after := t.planned[where]
		before, err := t.full(where, after == nil || after.Read)
		if err == nil && !sameAs(before, t.seen[where]) {
			err = fmt.Errorf("change %s: another program changed it meanwhile: run the command again", where)
		}
		if err != nil {
			p.fail(where, err)
			continue
		}
		if after != nil && before != nil {
			after.Xattrs = before.Xattrs
			after.Accessed, after.Modified = 0, 0 // the object will be new
		}
		p.changes = append(p.changes, change{Path: where, Before: before, After: after})
	}
	return p, nil
}

// fail records why an object is not changed, with the items that need the change.
func (p *Plan) fail(where string, err error) {
	for i := range p.Outcomes {
		if o := &p.Outcomes[i]; o.Error == "" && slices.Contains(o.Paths, where) {
			o.Error = err.Error()
		}
	}
}

// Close ends the use of the tree.
func (p *Plan) Close() error { return p.tree.Close() }

// Changes returns the number of objects that would be changed.
func (p *Plan) Changes() int { return len(p.changes) }

// Diff returns the planned changes as text.
func (p *Plan) Diff() string {
	var b strings.Builder
	for _, c := range p.changes {
		b.WriteString(c.diff())
	}
	return b.String()
}

// sameAs reports whether two states agree in all properties that a change may change; content counts if both are read.
func sameAs(a, b *state) bool {
	if a == nil || b == nil {
		return a == b
	}
	return a.Kind == b.Kind && a.Target == b.Target && (a.Kind == kindLink || a.Mode == b.Mode && a.UID == b.UID && a.GID == b.GID) &&
		(!a.Read || !b.Read || bytes.Equal(a.Content, b.Content))
}

// inPlace reports whether only permissions change.
func (c change) inPlace() bool {
	return c.Before != nil && c.After != nil && c.Before.Kind == c.After.Kind && (!c.After.Read || bytes.Equal(c.Before.Content, c.After.Content)) && c.Before.Kind != kindLink
}

// ours reports whether an object is as before, as planned, or between the two; in between, its content is that of before
// or after. An object that somebody has changed since is neither.
func (c change) ours(now *state) bool {
	if sameAs(now, c.Before) || sameAs(now, c.After) {
		return true
	}
	if now != nil && c.Before == nil && c.After != nil && c.After.Kind == kindFolder && now.Kind == kindFolder {
		return true // made, but without its mode yet; a folder with files is not removed
	}
	if now == nil || c.Before == nil || c.After == nil || !c.inPlace() || now.Kind != c.Before.Kind || c.Before.Read && !bytes.Equal(now.Content, c.Before.Content) {
		return false
	}
	// The kernel clears set-user-id and set-group-id when the owner changes (chown(2)).
	const set = unix.S_ISUID | unix.S_ISGID
	return (now.UID == c.Before.UID || now.UID == c.After.UID) && (now.GID == c.Before.GID || now.GID == c.After.GID) &&
		(now.Mode&^set == c.Before.Mode&^set || now.Mode&^set == c.After.Mode&^set)
}

// Apply makes the changes, after it has written a journal below folder. It returns the journal's name; "" if there was
// nothing to change. If a change fails, its outcomes say so, and the others are made. The error says that
// there is no journal, so nothing was changed.
func (p *Plan) Apply(folder string) (string, error) {
	if len(p.changes) == 0 {
		return "", nil
	}
	j, err := newJournal(folder, p.dir, p.changes)
	if err != nil {
		return "", err
	}
	failed := map[string]error{}
	for _, c := range j.Changes {
		now, err := p.tree.full(c.Path, c.After == nil || c.After.Read)
		if err == nil && !sameAs(now, c.Before) {
			err = errors.New("another program changed it meanwhile: run the command again")
		}
		if err == nil {
			err = p.tree.put(c, c.After)
		}
		if err != nil {
			failed[c.Path] = fmt.Errorf("change %s: %w", c.Path, err)
		}
		step("changed " + c.Path)
	}
	t, err := openTree(p.dir)
	if err != nil {
		return j.Name, err
	}
	defer t.Close() //nolint:errcheck // only read
	for i := range p.Outcomes {
		o := &p.Outcomes[i]
		item := p.items[slices.IndexFunc(p.items, func(item Item) bool { return item.ID == o.ID })]
		f := examineItem(t, &item)
		o.Fixed = f.status == Passes
		for _, where := range o.Paths {
			if err := failed[where]; err != nil && !o.Fixed {
				o.Error = cmp.Or(o.Error, err.Error())
			}
		}
		if !o.Fixed && o.ByHand == "" && o.Error == "" {
			o.Error = "it is still found: " + f.found
		}
	}
	return j.Name, nil
}

// step is called after each write to the disk. Tests end the process there.
var step = func(string) {}

// put brings an object into a state, in one step if the file system can: at any time the object is the old or the new one.
func (t *tree) put(c change, to *state) error {
	name := inRoot(c.Path)
	now, err := t.full(c.Path, false)
	if err != nil {
		return err
	}
	switch {
	case to == nil && now == nil:
		return nil
	case to == nil:
		if err := t.root.Remove(name); err != nil {
			return plain(err)
		}
	case to.Kind == kindFolder && now == nil:
		if err := t.root.Mkdir(name, 0o700); err != nil {
			return plain(err)
		}
		return errors.Join(t.attributes(name, to, false), t.sync(path.Dir(c.Path)))
	case to.Kind == kindLink:
		if err := t.root.Symlink(to.Target, name); err != nil {
			return plain(err)
		}
		if err := t.root.Lchown(name, to.UID, to.GID); err != nil {
			return plain(err)
		}
	case c.inPlace():
		return t.attributes(name, to, false)
	default:
		return t.replace(c, to)
	}
	return t.sync(path.Dir(c.Path))
}

// replace writes a file beside the file that it replaces, and renames it.
func (t *tree) replace(c change, to *state) error {
	temp := inRoot(path.Join(path.Dir(c.Path), c.Temp))
	f, err := t.root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return plain(err)
	}
	_, err = f.Write(to.Content)
	step("wrote " + c.Temp)
	err = errors.Join(err, t.attributes(temp, to, true), f.Sync(), f.Close())
	if err == nil {
		if err = t.root.Rename(temp, inRoot(c.Path)); err == nil {
			return t.sync(path.Dir(c.Path))
		}
	}
	return errors.Join(plain(err), t.root.Remove(temp))
}

// attributes sets owner, permissions, extended attributes and times, in this order, because each may clear the next.
func (t *tree) attributes(name string, to *state, isNew bool) error {
	if err := t.root.Chown(name, to.UID, to.GID); err != nil {
		return plain(err)
	}
	step("owner of " + name)
	if err := t.root.Chmod(name, goMode(to.Mode)); err != nil {
		return plain(err)
	}
	step("mode of " + name)
	f, err := t.root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return plain(err)
	}
	defer f.Close() //nolint:errcheck // only read
	have, err := readXattrs(f)
	if err != nil {
		return err
	}
	for key, value := range to.Xattrs {
		// The ACL's mask is the group's permissions, which chmod has just set, unless the file is new.
		if old, is := have[key]; is && (bytes.Equal(old, value) || key == "system.posix_acl_access" && !isNew) {
			continue
		}
		if err := unix.Fsetxattr(int(f.Fd()), key, value, 0); err != nil {
			return fmt.Errorf("set the extended attribute %s: %w", key, err)
		}
	}
	if to.Modified != 0 && to.Kind == kindFile && isNew {
		times := []unix.Timespec{unix.NsecToTimespec(to.Accessed), unix.NsecToTimespec(to.Modified)}
		if err := unix.UtimesNanoAt(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", f.Fd()), times, 0); err != nil {
			return fmt.Errorf("set its times: %w", err)
		}
	}
	return nil
}

// goMode returns the 12 bits as package os has them.
func goMode(bits uint32) os.FileMode {
	mode := os.FileMode(bits & 0o777)
	for bit, is := range map[uint32]os.FileMode{unix.S_ISUID: os.ModeSetuid, unix.S_ISGID: os.ModeSetgid, unix.S_ISVTX: os.ModeSticky} {
		if bits&bit != 0 {
			mode |= is
		}
	}
	return mode
}

// sync writes the names in a folder to the disk.
func (t *tree) sync(folder string) error {
	f, err := t.root.Open(inRoot(folder))
	if err != nil {
		return plain(err)
	}
	return errors.Join(f.Sync(), f.Close())
}
