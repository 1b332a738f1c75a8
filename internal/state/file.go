package state

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/model"
)

// fileVersion is of the format below. A file of another version is not read.
const fileVersion = 1

// overrideDocument is the file of overrides. The whole is replaced by a rename, so that a
// reader finds the one before or the one after.
type overrideDocument struct {
	Version int              `json:"version"`
	Drains  []overrideRecord `json:"drains"`
}

type overrideRecord struct {
	Address netip.Addr `json:"address"`
	Port    uint16     `json:"port,omitempty"` // 0 keeps the packet's destination port
	Drain
	Sources []string `json:"sources"`
}

// LoadError says that the file of overrides could not be used.
type LoadError struct {
	Path string
	Err  error
}

// Error names the file, what is wrong with it, and what that means.
func (e *LoadError) Error() string {
	return fmt.Sprintf("read the overrides in %s: %v; no backend is drained: look at the file and drain backends again, which replaces it", e.Path, e.Err)
}

// Unwrap is the cause.
func (e *LoadError) Unwrap() error { return e.Err }

// Open is a writer at revision 0 that keeps its overrides in a file, with those that the
// file has; a missing file has none. now is the wall clock. Whoever opens a writer again
// has to end the one before.
//
// The writer can be used even if there is an error, a *LoadError. It then has no overrides,
// and the file is left as it is until the next change of them.
func Open(path string, now func() time.Time) (*Writer, error) { return open(path, now, osDisk{}) }

func open(path string, now func() time.Time, d disk) (*Writer, error) {
	w := NewWriter()
	w.now, w.file = now, &overrideFile{path, d}
	overrides, err := w.file.load()
	if err != nil {
		return w, &LoadError{Path: path, Err: err}
	}
	w.overrides = overrides
	for backend, o := range w.overrides {
		o.Over = o.passed(now())
		w.overrides[backend] = o
	}
	w.snapshot.Drains = listed(w.overrides)
	return w, nil
}

// Save writes the overrides to the file if it may have others, because writing it failed
// before. nil means that the file is right. Replace writes the file too, but does not
// fail with it: so call Save after Replace, and again some time after an error.
func (w *Writer) Save() error {
	w.changing.Lock()
	defer w.changing.Unlock()
	return w.save()
}

func (w *Writer) save() error {
	if !w.unsaved {
		return nil
	}
	if w.file != nil {
		if err := w.file.save(w.overrides); err != nil {
			return fmt.Errorf("write the overrides to %s: %w; make room or mend the permissions there, and try again", w.file.path, err)
		}
	}
	w.unsaved = false
	return nil
}

// overrideFile is where overrides are kept. It is not safe for concurrent use.
type overrideFile struct {
	path string
	disk disk
}

func (f *overrideFile) load() (map[model.BackendAddress]Override, error) {
	data, err := f.disk.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return map[model.BackendAddress]Override{}, nil
	}
	if err != nil {
		return nil, err
	}
	return decode(data)
}

// decode reads the format, and refuses what this version would not write.
func decode(data []byte) (map[model.BackendAddress]Override, error) {
	var doc overrideDocument
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&doc); err != nil {
		return nil, fmt.Errorf("it is not whole, or not JSON as written here: %w", err)
	}
	if _, err := decoder.Token(); err != io.EOF {
		return nil, errors.New("something follows its end")
	}
	if doc.Version != fileVersion {
		return nil, fmt.Errorf("its version is %d, this one reads %d", doc.Version, fileVersion)
	}
	overrides := map[model.BackendAddress]Override{}
	for i, r := range doc.Drains {
		backend := model.BackendAddress{Address: r.Address, Port: r.Port}
		_, double := overrides[backend]
		switch {
		case !r.Address.IsValid() || r.Address.Is4In6() || r.Address.Zone() != "":
			return nil, fmt.Errorf("drain %d has address %q, which no backend has", i, r.Address)
		case double:
			return nil, fmt.Errorf("backend %s is there twice", backend)
		case len(r.Sources) == 0:
			return nil, fmt.Errorf("the drain of backend %s has no source", backend)
		}
		r.Since, r.Deadline = wall(r.Since), wall(r.Deadline)
		slices.Sort(r.Sources)
		overrides[backend] = Override{Backend: backend, Drain: r.Drain, Sources: slices.Compact(r.Sources)}
	}
	return overrides, nil
}

func encode(overrides map[model.BackendAddress]Override) ([]byte, error) {
	doc := overrideDocument{Version: fileVersion, Drains: []overrideRecord{}}
	for _, backend := range slices.SortedFunc(maps.Keys(overrides), compareBackends) {
		o := overrides[backend]
		doc.Drains = append(doc.Drains, overrideRecord{Address: backend.Address, Port: backend.Port, Drain: o.Drain, Sources: o.Sources})
	}
	text, err := json.MarshalIndent(doc, "", "  ")
	return append(text, '\n'), err
}

// save replaces the file. After an error it has the content before or the new one.
func (f *overrideFile) save(overrides map[model.BackendAddress]Override) (err error) {
	text, err := encode(overrides)
	if err != nil {
		return err
	}
	dir, temporary := filepath.Dir(f.path), f.path+".new"
	if err := f.disk.MkdirAll(dir); err != nil {
		return err
	}
	file, err := f.disk.Create(temporary)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = f.disk.Remove(temporary) // the next save overwrites it anyway
		}
	}()
	_, err = file.Write(text)
	if err == nil {
		err = file.Sync() // else the rename may reach the disk before the text does
	}
	if closed := file.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return err
	}
	if err := f.disk.Rename(temporary, f.path); err != nil {
		return err
	}
	return f.disk.SyncDir(dir)
}

// disk is what overrideFile needs of a file system; tests make it fail.
type disk interface {
	ReadFile(path string) ([]byte, error)
	MkdirAll(path string) error
	Create(path string) (diskFile, error) // an empty file, readable by root alone
	Rename(from, to string) error
	Remove(path string) error
	SyncDir(path string) error // makes a rename in it durable
}

type diskFile interface {
	io.WriteCloser
	Sync() error
}

// osDisk is the machine's.
type osDisk struct{}

func (osDisk) ReadFile(path string) ([]byte, error) { return os.ReadFile(path) }
func (osDisk) MkdirAll(path string) error           { return os.MkdirAll(path, 0o700) }
func (osDisk) Rename(from, to string) error         { return os.Rename(from, to) }
func (osDisk) Remove(path string) error             { return os.Remove(path) }

func (osDisk) Create(path string) (diskFile, error) {
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
}

func (osDisk) SyncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	err = dir.Sync()
	return errors.Join(err, dir.Close())
}
