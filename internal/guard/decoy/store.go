package decoy

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/record"
)

// Directory is the folder of the journal.
const Directory = "/var/lib/shunt/decoys"

// ErrBusy means that another process of shunt is changing decoys.
var ErrBusy = errors.New("another command of shunt is changing decoys; try again when it has ended")

// Decoy is a file that shunt has made, or is about to make.
type Decoy struct {
	Path   string    `json:"path"`
	Temp   string    `json:"temp"` // its name in the same folder until it is complete
	Kind   string    `json:"kind"`
	Seed   uint64    `json:"seed"` // of the contents
	Size   int64     `json:"size"`
	MTime  time.Time `json:"mtime"`
	SHA256 string    `json:"sha256"`
}

// The states of a decoy.
const (
	Stands  = "stands"
	Changed = "changed" // another file is in its place, or its contents have changed
	Gone    = "gone"
	Unknown = "unknown" // it cannot be read
)

// State is a decoy with its present state.
type State struct {
	Decoy
	State string `json:"state"`
	Why   string `json:"why,omitempty"` // reason for Unknown
}

// journal lists all decoys of the machine. It is written before a decoy is made, and drops a decoy when its file is gone.
type journal struct {
	Version int     `json:"version"`
	Decoys  []Decoy `json:"decoys"`
}

const journalVersion = 1

// step is called between the steps of a change; tests end the process there.
var step = func(string) {}

// Store is the locked journal; one process at a time can have it.
type Store struct {
	folder  string
	lock    *os.File
	journal journal
}

func journalIn(folder string) string { return filepath.Join(folder, "journal.json") }

// Open locks the journal in a folder, which it makes. The error is ErrBusy, among others.
func Open(folder string) (*Store, error) {
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, fmt.Errorf("keep the journal of decoys: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(folder, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("keep the journal of decoys: %w", err)
	}
	s := &Store{folder: folder, lock: lock}
	err = record.Hold(lock)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		err = ErrBusy
	}
	if err == nil {
		record.Sweep(folder, filepath.Base(journalIn(folder))) // of a process that was killed while it wrote
		s.journal, err = load(folder)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Close unlocks the journal.
func (s *Store) Close() error { return s.lock.Close() }

func load(folder string) (j journal, err error) {
	j.Version = journalVersion
	if err := record.Read(journalIn(folder), &j); err != nil {
		return j, fmt.Errorf("read the journal of decoys %s: %w. Nothing was changed", journalIn(folder), err)
	}
	if j.Version != journalVersion {
		return j, fmt.Errorf("read the journal of decoys %s: it has version %d, and this shunt knows version %d: use the shunt that wrote it", journalIn(folder), j.Version, journalVersion)
	}
	return j, nil
}

func (s *Store) save() error {
	if err := record.Write(journalIn(s.folder), s.journal); err != nil {
		return fmt.Errorf("write the journal of decoys: %w. No decoy was made", err)
	}
	return nil
}

// List returns all decoys with their present state. It changes nothing, and does not lock the journal.
func List(folder string) ([]State, error) {
	j, err := load(folder)
	if err != nil {
		return nil, err
	}
	all := make([]State, 0, len(j.Decoys))
	for _, d := range j.Decoys {
		state, err := d.state()
		one := State{Decoy: d, State: state}
		if err != nil {
			one.Why = err.Error()
		}
		all = append(all, one)
	}
	return all, nil
}

// Report lists decoys by outcome.
type Report struct {
	Done []string `json:"done"` // paths
	Left []string `json:"left"` // paths, each with the reason
}

func (r *Report) leave(path string, err error) {
	r.Left = append(r.Left, fmt.Sprintf("%s: %v", path, err))
}

// Make makes decoys in each of the folders, and keeps existing ones. The error says that the journal could not be written, and
// then no decoy was made.
func (s *Store) Make(folders []string) (r Report, err error) {
	have := map[string]bool{}
	for _, d := range s.journal.Decoys {
		have[filepath.Dir(d.Path)] = true
	}
	for _, folder := range folders {
		if have[folder] {
			continue
		}
		all, err := planned(folder, rand.Uint64(), func(name string) bool {
			_, err := os.Lstat(join(folder, name))
			return !errors.Is(err, fs.ErrNotExist)
		})
		if err != nil {
			r.leave(folder, err)
			continue
		}
		s.journal.Decoys = append(s.journal.Decoys, all...)
	}
	if err := s.save(); err != nil {
		return r, err
	}
	step("journal")
	for _, d := range s.journal.Decoys {
		if slices.Contains(folders, filepath.Dir(d.Path)) {
			s.remake(d, &r)
		}
	}
	return r, nil
}

// remake makes a decoy again whose file is gone.
func (s *Store) remake(d Decoy, r *Report) {
	switch state, err := d.state(); {
	case state == Unknown:
		r.leave(d.Path, err)
	case state == Gone:
		if err := d.make(); err != nil {
			r.leave(d.Path, err)
		} else {
			r.Done = append(r.Done, d.Path)
		}
	}
}

// Restore makes decoys again whose files are gone and, with replace, changed ones: the files that replaced them are then lost.
func (s *Store) Restore(replace bool) (r Report, err error) {
	for i := range s.journal.Decoys { // this version of shunt may make other contents
		d := &s.journal.Decoys[i]
		state, err := d.state()
		switch {
		case state == Stands:
			continue
		case state == Unknown:
			r.leave(d.Path, err)
			continue
		case state == Changed && !replace:
			r.leave(d.Path, errors.New("it was changed or replaced by another file: --replace puts the decoy in its place"))
			continue
		case state == Changed:
			if err := d.unlink(); err != nil {
				r.leave(d.Path, err)
				continue
			}
		}
		if d.Size < largestBytes {
			d.Size = 0
		}
		if err := d.fill(); err != nil {
			return r, err
		}
	}
	if err := s.save(); err != nil {
		return r, err
	}
	for _, d := range s.journal.Decoys {
		if state, _ := d.state(); state == Gone {
			s.remake(d, &r)
		}
	}
	return r, nil
}

// Remove removes the decoys of folders that keep does not want; nil: all. A changed file stays, and leaves the journal.
func (s *Store) Remove(keep func(folder string) bool) (r Report, err error) {
	var stay []Decoy
	for _, d := range s.journal.Decoys {
		if keep != nil && keep(filepath.Dir(d.Path)) {
			stay = append(stay, d)
			continue
		}
		state, err := d.state()
		if err == nil {
			err = d.sweep()
		}
		if err == nil && state == Stands {
			err = d.unlink()
		}
		switch {
		case err != nil:
			stay = append(stay, d)
			r.leave(d.Path, err)
		case state == Changed:
			r.leave(d.Path, errors.New("it was changed or replaced by another file: delete it yourself if you do not need it"))
		case state == Stands:
			r.Done = append(r.Done, d.Path)
		}
		step("removed")
	}
	s.journal.Decoys = stay
	if len(stay) > 0 {
		return r, s.save()
	}
	return r, record.Remove(journalIn(s.folder))
}

// Decoys returns the decoys in the journal.
func (s *Store) Decoys() []Decoy { return s.journal.Decoys }

// openFolder opens a decoy's folder, through no symbolic link.
func openFolder(path string) (int, error) {
	fd, err := unix.Openat2(unix.AT_FDCWD, path, &unix.OpenHow{Flags: unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS})
	if err != nil {
		return -1, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	return fd, nil
}

// in runs a function on the decoy's folder.
func (d *Decoy) in(do func(folder int) error) error {
	folder, err := openFolder(filepath.Dir(d.Path))
	if err != nil {
		return err
	}
	defer unix.Close(folder) //nolint:errcheck // nothing was written
	return do(folder)
}

// state returns the state of the file. The error is the reason for Unknown.
func (d *Decoy) state() (state string, err error) {
	state = Unknown
	err = d.in(func(folder int) error {
		fd, err := unix.Openat(folder, filepath.Base(d.Path), unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENXIO) {
			state = Changed // the path has a symbolic link, or a socket
			return nil
		}
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(fd), d.Path)
		defer f.Close() //nolint:errcheck // only read
		info, err := f.Stat()
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() || info.Size() != d.Size {
			state = Changed
			return nil
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, io.LimitReader(f, d.Size+1)); err != nil {
			return err
		}
		state = Changed
		if hex.EncodeToString(sum.Sum(nil)) == d.SHA256 {
			state = Stands
		}
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return Gone, nil
	}
	return state, err
}

// sweep removes an incomplete decoy that a killed process has left.
func (d *Decoy) sweep() error {
	err := d.in(func(folder int) error { return unix.Unlinkat(folder, d.Temp, 0) })
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (d *Decoy) unlink() error {
	return d.in(func(folder int) error { return unix.Unlinkat(folder, filepath.Base(d.Path), 0) })
}

// make makes the file, complete or not at all, and never in the place of another one. The file belongs to the folder's owner, so that a
// program of that user can harm it, and the owner's quota counts it.
func (d *Decoy) make() error {
	if err := d.sweep(); err != nil {
		return fmt.Errorf("make the decoy: %w", err)
	}
	head, err := d.head()
	if err != nil {
		return err
	}
	return d.in(func(folder int) (err error) {
		var owner unix.Stat_t
		if err := unix.Fstat(folder, &owner); err != nil {
			return err
		}
		fd, err := unix.Openat(folder, d.Temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		if err != nil {
			return fmt.Errorf("make the decoy: %w", err)
		}
		step("temp")
		defer func() {
			if err != nil {
				err = fmt.Errorf("make the decoy: %w", err)
				_ = unix.Unlinkat(folder, d.Temp, 0) // the next sweep removes it
			}
		}()
		f := os.NewFile(uintptr(fd), d.Path)
		_, err = f.Write(head)
		step("half")
		at := unix.NsecToTimespec(d.MTime.UnixNano())
		err = errors.Join(err, f.Truncate(d.Size), unix.Fchown(fd, int(owner.Uid), int(owner.Gid)), f.Chmod(fs.FileMode(owner.Mode)&0o664|0o600), f.Close())
		if err != nil {
			return err
		}
		if err := unix.UtimesNanoAt(folder, d.Temp, []unix.Timespec{at, at}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
		if err := unix.Renameat2(folder, d.Temp, folder, filepath.Base(d.Path), unix.RENAME_NOREPLACE); err != nil {
			return err
		}
		step("made")
		return nil
	})
}
