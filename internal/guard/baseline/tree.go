package baseline

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// fileBytesMax is far more than the size of a file of settings; /etc/passwd of 50,000 accounts has 4 MB.
	fileBytesMax = 8 << 20
	linksMax     = 40 // as the kernel's MAXSYMLINKS
	modeBits     = 0o7777
)

// The kinds of objects that can be changed.
const (
	kindFile   = "file"
	kindLink   = "link"
	kindFolder = "folder"
	kindOther  = "device, FIFO or socket"
)

// state is the state of an object at one time. A nil *state: the object does not exist.
type state struct {
	Kind     string            `json:"kind"`
	Read     bool              `json:"read,omitempty"` // Content is known
	Content  []byte            `json:"content,omitempty"`
	Target   string            `json:"target,omitempty"` // of a link
	Mode     uint32            `json:"mode"`             // the 12 lowest bits
	UID      int               `json:"uid"`
	GID      int               `json:"gid"`
	Names    uint64            `json:"-"` // hard links
	Xattrs   map[string][]byte `json:"xattrs,omitempty"`
	Accessed int64             `json:"accessed_ns,omitempty"` // since 1970
	Modified int64             `json:"modified_ns,omitempty"`
}

// tree is a system's files. Paths are absolute in the system. Symbolic links lead where they would lead on the running
// system: they never leave the tree, because os.Root prevents that.
type tree struct {
	root    *os.Root
	seen    map[string]*state // states that were examined, by the path without links
	planned map[string]*state // planned states
	order   []string          // the paths of planned, in the order of the plans
}

func openTree(dir string) (*tree, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("open the system's root: %w; name a folder with --root", err)
	}
	return &tree{root: root, seen: map[string]*state{}, planned: map[string]*state{}}, nil
}

func (t *tree) Close() error { return t.root.Close() }

// inRoot returns the path as os.Root takes it.
func inRoot(name string) string {
	if name = strings.TrimPrefix(path.Clean("/"+name), "/"); name == "" {
		return "."
	}
	return name
}

// errNotFollowed is the error for a path that cannot be followed.
var errNotFollowed = errors.New("too many symbolic links")

// resolve returns the path without symbolic links, as the system itself would find it: an absolute link begins at the tree's
// root, and .. of the root is the root. Parts that do not exist stay as they are written.
func (t *tree) resolve(name string) (string, error) {
	rest, done, links := strings.Split(path.Clean("/" + name)[1:], "/"), "/", 0
	for len(rest) > 0 {
		next := rest[0]
		rest = rest[1:]
		if next == "" || next == "." {
			continue
		}
		if next == ".." {
			done = path.Dir(done)
			continue
		}
		here := path.Join(done, next)
		s, err := t.at(here)
		if err != nil {
			return "", err
		}
		if s == nil || s.Kind != kindLink {
			done = here
			continue
		}
		if links++; links > linksMax {
			return "", fmt.Errorf("follow %s: %w", name, errNotFollowed)
		}
		if path.IsAbs(s.Target) {
			done = "/"
		}
		rest = append(strings.Split(s.Target, "/"), rest...)
	}
	return done, nil
}

// at returns the object at a path whose folders are no links, without its content; nil if there is none.
func (t *tree) at(name string) (*state, error) {
	if s, is := t.planned[name]; is {
		return s, nil
	}
	if s, is := t.seen[name]; is {
		return s, nil
	}
	s, err := t.look(name)
	if err == nil {
		t.seen[name] = s
	}
	return s, err
}

// look asks the file system for the object at a path, without its content and extended attributes.
func (t *tree) look(name string) (*state, error) {
	info, err := t.root.Lstat(inRoot(name))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look at %s: %w", name, plain(err))
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil, fmt.Errorf("look at %s: the file system has no owners", name)
	}
	s := &state{Kind: kindOther, Mode: stat.Mode & modeBits, UID: int(stat.Uid), GID: int(stat.Gid), Names: uint64(stat.Nlink),
		Accessed: stat.Atim.Nano(), Modified: stat.Mtim.Nano()}
	switch {
	case info.Mode().IsRegular():
		s.Kind = kindFile
	case info.IsDir():
		s.Kind = kindFolder
	case info.Mode()&fs.ModeSymlink != 0:
		s.Kind = kindLink
		if s.Target, err = t.root.Readlink(inRoot(name)); err != nil {
			return nil, fmt.Errorf("read the link %s: %w", name, plain(err))
		}
	}
	return s, nil
}

// plain returns the cause of an error of the os package, which names the path in its own way.
func plain(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	var l *os.LinkError
	if errors.As(err, &l) {
		return l.Err
	}
	return err
}

// full returns the object with its content (of a file, if asked for) and extended attributes.
func (t *tree) full(name string, content bool) (*state, error) {
	s, err := t.look(name)
	if err != nil || s == nil || s.Kind == kindLink || s.Kind == kindOther {
		return s, err
	}
	// The kind may have changed since: opening a FIFO must not wait.
	f, err := t.root.OpenFile(inRoot(name), os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_NOATIME, 0)
	if errors.Is(err, unix.EPERM) { // only the owner may use O_NOATIME
		f, err = t.root.OpenFile(inRoot(name), os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", name, plain(err))
	}
	defer f.Close() //nolint:errcheck // only read
	if s.Xattrs, err = readXattrs(f); err != nil {
		return nil, fmt.Errorf("read the extended attributes of %s: %w", name, err)
	}
	if s.Kind != kindFile || !content {
		return s, nil
	}
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, plain(err))
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("read %s: it is no longer a file", name)
	}
	if s.Content, err = io.ReadAll(io.LimitReader(f, fileBytesMax+1)); err != nil {
		return nil, fmt.Errorf("read %s: %w", name, plain(err))
	}
	if len(s.Content) > fileBytesMax {
		return nil, fmt.Errorf("read %s: it has more than %d bytes, which no file of settings has", name, fileBytesMax)
	}
	s.Read = true
	return s, nil
}

// read returns the content of a file, through links; nil if there is no such file. where is the path without links.
func (t *tree) read(name string) (content []byte, where string, err error) {
	if where, err = t.resolve(name); err != nil {
		return nil, "", err
	}
	s, err := t.at(where)
	if err != nil || s == nil {
		return nil, where, err
	}
	if s.Kind != kindFile {
		return nil, where, fmt.Errorf("read %s: it is a %s, and no file", name, s.Kind)
	}
	if !s.Read {
		mode := s
		if s, err = t.full(where, true); err != nil {
			return nil, where, err
		}
		if s == nil || !s.Read {
			return nil, where, fmt.Errorf("read %s: it changed meanwhile; run the command again", name)
		}
		if planned, is := t.planned[where]; is { // only its mode was planned so far
			s.Mode, s.UID, s.GID = planned.Mode, planned.UID, planned.GID
			t.planned[where] = s
		} else {
			s.Mode, s.UID, s.GID = mode.Mode, mode.UID, mode.GID
			t.seen[where] = s
		}
	}
	if s.Content == nil {
		return []byte{}, where, nil
	}
	return s.Content, where, nil
}

// glob returns the paths that match a pattern (path.Match in each part), sorted. It returns a path without a pattern if it exists.
func (t *tree) glob(pattern string) ([]string, error) {
	found := []string{"/"}
	for _, part := range strings.Split(path.Clean("/" + pattern)[1:], "/") {
		var next []string
		for _, folder := range found {
			names := []string{part}
			if strings.ContainsAny(part, `*?[\`) {
				var err error
				if names, err = t.list(folder); err != nil {
					return nil, err
				}
			}
			for _, name := range names {
				if matched, err := path.Match(part, name); err != nil {
					return nil, fmt.Errorf("the pattern %q: %w", pattern, err)
				} else if !matched && name != part || strings.HasPrefix(name, ".") && !strings.HasPrefix(part, ".") {
					continue
				}
				full := path.Join(folder, name)
				where, err := t.resolve(full)
				if err != nil {
					return nil, err
				}
				if s, err := t.at(where); err != nil {
					return nil, err
				} else if s != nil {
					next = append(next, full)
				}
			}
		}
		found = next
	}
	return found, nil
}

// list returns the names in a folder, sorted; none if there is no such folder.
func (t *tree) list(folder string) ([]string, error) {
	where, err := t.resolve(folder)
	if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	if s, err := t.look(where); err == nil && s != nil && s.Kind == kindFolder {
		f, err := t.root.OpenFile(inRoot(where), os.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", folder, plain(err))
		}
		defer f.Close() //nolint:errcheck // only read
		all, err := f.Readdirnames(-1)
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", folder, plain(err))
		}
		for _, name := range all {
			names[name] = true
		}
	}
	for name, s := range t.planned {
		if path.Dir(name) == where {
			if names[path.Base(name)] = s != nil; s == nil {
				delete(names, path.Base(name))
			}
		}
	}
	return slices.Sorted(maps.Keys(names)), nil
}

// plan sets the planned state of an object; nil: it will be removed.
func (t *tree) plan(where string, s *state) {
	if _, is := t.planned[where]; !is {
		t.order = append(t.order, where)
	}
	t.planned[where] = s
}

// write plans a file's content. A file that does not exist is made with this mode, root's, and so are missing folders above it.
func (t *tree) write(name string, content []byte, mode uint32) error {
	old, where, err := t.read(name)
	if err != nil {
		return err
	}
	if old != nil {
		s := *t.planned[where].or(t.seen[where])
		if s.Names > 1 {
			return fmt.Errorf("%s has %d names (hard links), and would keep only one of them", where, s.Names)
		}
		s.Content = content
		t.plan(where, &s)
		return nil
	}
	if err := t.folders(path.Dir(where)); err != nil {
		return err
	}
	t.plan(where, &state{Kind: kindFile, Read: true, Content: content, Mode: mode})
	return nil
}

func (s *state) or(other *state) *state {
	if s != nil {
		return s
	}
	return other
}

// folders plans a folder and those above it, if they do not exist.
func (t *tree) folders(where string) error {
	s, err := t.at(where)
	if err != nil || s != nil && s.Kind == kindFolder {
		return err
	}
	if s != nil {
		return fmt.Errorf("%s is no folder", where)
	}
	if err := t.folders(path.Dir(where)); err != nil {
		return err
	}
	t.plan(where, &state{Kind: kindFolder, Mode: 0o755})
	return nil
}

// link plans a symbolic link at a path without an object.
func (t *tree) link(name, target string) error {
	if err := t.folders(path.Dir(name)); err != nil {
		return err
	}
	if s, err := t.at(name); err != nil {
		return err
	} else if s != nil {
		return fmt.Errorf("%s is there already", name)
	}
	t.plan(name, &state{Kind: kindLink, Target: target, Mode: 0o777})
	return nil
}

// undoPlans forgets the plans that were made since.
func (t *tree) undoPlans(planned map[string]*state, order []string) {
	t.planned, t.order = planned, order
}

// plans returns the plans made so far.
func (t *tree) plans() (map[string]*state, []string) {
	return maps.Clone(t.planned), slices.Clone(t.order)
}

// readXattrs returns all extended attributes of an open file; none if its file system has none.
func readXattrs(f *os.File) (map[string][]byte, error) {
	size, err := unix.Flistxattr(int(f.Fd()), nil)
	if errors.Is(err, unix.ENOTSUP) || err == nil && size == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	names := make([]byte, size)
	if size, err = unix.Flistxattr(int(f.Fd()), names); err != nil {
		return nil, err
	}
	all := map[string][]byte{}
	for _, name := range bytes.Split(bytes.TrimSuffix(names[:size], []byte{0}), []byte{0}) {
		size, err := unix.Fgetxattr(int(f.Fd()), string(name), nil)
		if err != nil {
			return nil, err
		}
		value := make([]byte, size)
		if size > 0 {
			if size, err = unix.Fgetxattr(int(f.Fd()), string(name), value); err != nil {
				return nil, err
			}
		}
		all[string(name)] = value[:size]
	}
	return all, nil
}
