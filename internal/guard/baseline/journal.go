package baseline

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"

	"github.com/shunt-lb/shunt/internal/record"
)

// DefaultJournal is the folder of the journals.
const DefaultJournal = "/var/lib/shunt/baseline"

// journalFile is the file in a journal's folder; the file of a journal that was rolled back is called journalDone.
const (
	journalFile = "journal.json"
	journalDone = "rolled-back.json"
)

// journal lists the changes of one run of fix. It is complete and on the disk before the first change.
type journal struct {
	Version int      `json:"version"`
	Name    string   `json:"name"` // 1, 2, …
	Root    string   `json:"root"` // absolute
	Changes []change `json:"changes"`
}

const journalVersion = 1

// newJournal writes a journal. It contains hashes of passwords, so only its owner may read it.
func newJournal(folder, dir string, changes []change) (*journal, error) {
	root, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("write a journal: %w", err)
	}
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, fmt.Errorf("write a journal: %w; nothing was changed. Name another folder with --journal", err)
	}
	unlock, err := lockJournals(folder)
	if err != nil {
		return nil, fmt.Errorf("write a journal: %w; nothing was changed", err)
	}
	defer unlock() //nolint:errcheck // the folder was only read by it
	number := 1
	names, err := journalNames(folder)
	if err != nil {
		return nil, err
	}
	if len(names) > 0 {
		number = names[len(names)-1] + 1
	}
	j := &journal{Version: journalVersion, Name: strconv.Itoa(number), Root: root, Changes: slices.Clone(changes)}
	for i := range j.Changes {
		j.Changes[i].Temp = fmt.Sprintf(".shunt-baseline-%s-%d", j.Name, i)
	}
	text, err := json.MarshalIndent(j, "", " ")
	if err != nil {
		return nil, fmt.Errorf("write a journal: %w", err)
	}
	own := filepath.Join(folder, j.Name)
	if err := os.Mkdir(own, 0o700); err != nil { // another run of fix has taken the number
		return nil, fmt.Errorf("write a journal: %w; nothing was changed", err)
	}
	if err := writeSynced(own, text); err != nil {
		return nil, fmt.Errorf("write a journal: %w; nothing was changed", err)
	}
	if err := syncFolder(folder); err != nil {
		return nil, fmt.Errorf("write a journal: %w; nothing was changed", err)
	}
	step("journal")
	return j, nil
}

// lockJournals waits until no other process writes a journal in a folder, and removes the parts of journals that processes were
// killed at. The processes had changed nothing.
func lockJournals(folder string) (unlock func() error, err error) {
	f, err := os.Open(folder)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", folder, err), f.Close())
	}
	numbers, err := journalNames(folder)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	for _, number := range numbers {
		own := filepath.Join(folder, strconv.Itoa(number))
		record.Sweep(own, journalFile)
		_ = os.Remove(own) // if it has nothing else, there is no such journal
	}
	return f.Close, nil
}

func writeSynced(own string, text []byte) error {
	f, err := os.OpenFile(filepath.Join(own, journalFile+".new"), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	step("half a journal")
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), filepath.Join(own, journalFile)); err != nil {
		return err
	}
	return syncFolder(own)
}

func syncFolder(folder string) error {
	f, err := os.Open(folder)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// journalNames returns the numbers of the journals, sorted.
func journalNames(folder string) (numbers []int, err error) {
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list the journals: %w", err)
	}
	for _, e := range entries {
		if n, err := strconv.Atoi(e.Name()); err == nil && n > 0 && e.IsDir() && strconv.Itoa(n) == e.Name() {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	return numbers, nil
}

// Rollback is the result of RollBack.
type Rollback struct {
	Journal  string   `json:"journal"`
	Restored []string `json:"restored"`
	Left     []string `json:"left,omitempty"` // objects that were left as they are, with the reason
}

// RollBack takes back the newest run of fix that was not taken back yet, of the system whose root is dir. It leaves objects
// that somebody has changed since, and names them; the journal then stays, so that RollBack can be tried again. It may be
// interrupted and repeated. nil: there is nothing to take back.
func RollBack(dir, folder string) (*Rollback, error) {
	root, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("roll back: %w", err)
	}
	unlock, err := lockJournals(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err == nil {
		err = unlock()
	}
	if err != nil {
		return nil, fmt.Errorf("roll back: %w", err)
	}
	names, err := journalNames(folder)
	if err != nil {
		return nil, err
	}
	for _, number := range slices.Backward(names) {
		own := filepath.Join(folder, strconv.Itoa(number))
		text, err := os.ReadFile(filepath.Join(own, journalFile))
		if errors.Is(err, fs.ErrNotExist) { // rolled back, or fix ended before it changed anything
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("roll back: %w", err)
		}
		var j journal
		if err := json.Unmarshal(text, &j); err != nil {
			return nil, fmt.Errorf("roll back: read %s: %w", filepath.Join(own, journalFile), err)
		}
		if j.Version != journalVersion {
			return nil, fmt.Errorf("roll back: %s has version %d, and this shunt knows version %d: use the shunt that wrote it", own, j.Version, journalVersion)
		}
		if j.Root != root {
			continue
		}
		return j.rollBack(own)
	}
	return nil, nil
}

func (j *journal) rollBack(own string) (*Rollback, error) {
	t, err := openTree(j.Root)
	if err != nil {
		return nil, err
	}
	defer t.Close() //nolint:errcheck // every write was synced
	r := &Rollback{Journal: j.Name}
	for _, c := range slices.Backward(j.Changes) {
		if temp := inRoot(path.Join(path.Dir(c.Path), c.Temp)); c.Temp == "" || path.Base(c.Temp) != c.Temp {
			return nil, fmt.Errorf("roll back: %s names no temporary file for %s", own, c.Path)
		} else if err := t.root.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
			r.Left = append(r.Left, fmt.Sprintf("%s: remove %s: %v", c.Path, temp, plain(err)))
			continue
		}
		was, err := t.back(c)
		if err != nil {
			r.Left = append(r.Left, fmt.Sprintf("%s: %v", c.Path, err))
		} else if was {
			r.Restored = append(r.Restored, c.Path)
		}
		step("restored " + c.Path)
	}
	if len(r.Left) > 0 {
		return r, nil
	}
	if err := os.Rename(filepath.Join(own, journalFile), filepath.Join(own, journalDone)); err != nil {
		return r, fmt.Errorf("roll back: everything is restored, but the journal cannot be closed: %w", err)
	}
	return r, syncFolder(own)
}

// back restores an object's state before the change. was reports whether the state differed.
func (t *tree) back(c change) (was bool, err error) {
	now, err := t.full(c.Path, c.Before != nil && c.Before.Read || c.After != nil && c.After.Read)
	if err != nil {
		return false, err
	}
	if sameAs(now, c.Before) {
		if c.inPlace() && now != nil { // a chown cleared extended attributes, and the crash was before they were set again
			return false, t.attributes(inRoot(c.Path), c.Before, false)
		}
		return false, nil
	}
	if !c.ours(now) {
		return false, errors.New("somebody changed it since, so it is left as it is")
	}
	return true, t.put(c, c.Before)
}
