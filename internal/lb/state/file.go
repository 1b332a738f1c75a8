package state

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/record"
)

// fileVersion is the version of the format below. A file of another version is not read.
const fileVersion = 2

// overrideDocument is the file of overrides. A rename replaces it as a whole, so that a reader finds the old
// file or the new one.
type overrideDocument struct {
	Version int `json:"version"`
	// SHA256 is the checksum of Overrides without white space, in hexadecimal: it detects a file that the disk
	// tore or changed, so that a wrong weight is never used.
	SHA256    string          `json:"sha256"`
	Overrides json.RawMessage `json:"overrides"` // []overrideRecord
}

type overrideRecord struct {
	Address  netip.Addr `json:"address"`
	Port     uint16     `json:"port,omitempty"` // 0 keeps the packet's destination port
	Kind     Kind       `json:"kind"`
	Weight   *uint16    `json:"weight,omitempty"`
	Health   Health     `json:"health,omitempty"`
	Deadline time.Time  `json:"deadline,omitzero"`
	Since    time.Time  `json:"since"`
	Author
	Sources []string `json:"sources"`
}

// LoadError says that the file of overrides could not be used.
type LoadError struct {
	Path  string
	Aside string // where the file is now; empty: it could not be moved, and the next save replaces it
	Err   error
}

// Error names the file, the fault, and its effect.
func (e *LoadError) Error() string {
	kept := "the file is kept as " + e.Aside
	if e.Aside == "" {
		kept = "the file could not be renamed, and the next override replaces it"
	}
	return fmt.Sprintf("read the overrides in %s: %v; no override is in force, and %s", e.Path, e.Err, kept)
}

// Unwrap returns the cause.
func (e *LoadError) Unwrap() error { return e.Err }

// AsideOf returns the path at which an unusable file of overrides is kept for inspection.
func AsideOf(path string) string { return path + ".damaged" }

// Open returns a writer at revision 0 that keeps its overrides in a file, and begins with the
// overrides in the file; a missing file has none. now is the wall clock; if that clock may be
// set, now is a clock that goes on evenly until ShiftDeadlines. An earlier writer of the file
// must have ended before.
//
// The writer can be used even if there is an error, a *LoadError. It then has no overrides,
// and the file has been put aside.
func Open(path string, now func() time.Time) (*Writer, error) { return open(path, now, record.OS) }

func open(path string, now func() time.Time, d record.Disk) (*Writer, error) {
	w := NewWriter()
	w.now, w.file = now, &overrideFile{path, d}
	overrides, err := w.file.load()
	if err != nil {
		failed := &LoadError{Path: path, Aside: AsideOf(path), Err: err}
		if err := d.Rename(path, failed.Aside); err != nil {
			failed.Aside, failed.Err = "", errors.Join(failed.Err, err)
		}
		return w, failed
	}
	w.overrides = overrides
	for key, o := range w.overrides {
		o.Over = o.passed(now())
		w.overrides[key] = o
	}
	w.snapshot.Overrides = listed(w.overrides)
	return w, nil
}

// Save writes the overrides to the file if an earlier attempt failed. nil means that the file is correct.
// Changes of overrides write the file too, but do not fail with it: so call Save some time after Unsaved has
// returned an error.
func (w *Writer) Save() error {
	w.changing.Lock()
	defer w.changing.Unlock()
	return w.save()
}

// Unsaved returns the reason why overrides in force would not survive a restart; nil: they would.
func (w *Writer) Unsaved() error {
	w.changing.Lock()
	defer w.changing.Unlock()
	return w.saveError
}

func (w *Writer) save() error {
	if !w.unsaved {
		return nil
	}
	w.saveError = nil
	if w.file != nil {
		if err := w.file.save(w.overrides); err != nil {
			w.saveError = fmt.Errorf("write the overrides to %s: %w", w.file.path, err)
			return w.saveError
		}
	}
	w.unsaved = false
	return nil
}

// overrideFile is the file of overrides. It is not safe for concurrent use.
type overrideFile struct {
	path string
	disk record.Disk
}

func (f *overrideFile) load() (map[overrideKey]Override, error) {
	data, err := f.disk.ReadFile(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return map[overrideKey]Override{}, nil
	}
	if err != nil {
		return nil, err
	}
	return decode(data)
}

// strictly reads one JSON value, and refuses fields that into lacks, and text after the value.
func strictly(data []byte, into any) error {
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(into); err != nil {
		return fmt.Errorf("it is incomplete, or not JSON that shunt wrote: %w", err)
	}
	if _, err := decoder.Token(); err != io.EOF {
		return errors.New("there is more text after its end")
	}
	return nil
}

// sum returns the checksum of a JSON text, regardless of its white space.
func sum(text []byte) string {
	var compact bytes.Buffer
	_ = json.Compact(&compact, text) // it was decoded, or encoded, and so is valid
	digest := sha256.Sum256(compact.Bytes())
	return hex.EncodeToString(digest[:])
}

// decode reads the format, and refuses content that this version would not write.
func decode(data []byte) (map[overrideKey]Override, error) {
	var doc overrideDocument
	if err := strictly(data, &doc); err != nil {
		return nil, err
	}
	if doc.Version != fileVersion {
		return nil, fmt.Errorf("its version is %d, but this shunt reads version %d", doc.Version, fileVersion)
	}
	if doc.SHA256 != sum(doc.Overrides) {
		return nil, errors.New("its checksum does not match its content: it was damaged, or changed by hand")
	}
	var records []overrideRecord
	if err := strictly(doc.Overrides, &records); err != nil {
		return nil, err
	}
	overrides := map[overrideKey]Override{}
	for i, r := range records {
		key := overrideKey{model.BackendAddress{Address: r.Address, Port: r.Port}, r.Kind}
		_, double := overrides[key]
		isWeight, isHealth := r.Kind == KindWeight, r.Kind == KindHealth
		switch {
		case !r.Address.IsValid() || r.Address.Is4In6() || r.Address.Zone() != "":
			return nil, fmt.Errorf("override %d has address %q, which no backend has", i, r.Address)
		case !slices.Contains(Kinds, r.Kind):
			return nil, fmt.Errorf("override %d is of kind %q, which this version does not know", i, r.Kind)
		case double:
			return nil, fmt.Errorf("backend %s has a %s twice", key.backend, r.Kind)
		case len(r.Sources) == 0:
			return nil, fmt.Errorf("the %s of backend %s has no source", r.Kind, key.backend)
		case isWeight != (r.Weight != nil), isHealth != (r.Health == HealthUp || r.Health == HealthDown), !isHealth && r.Health != "":
			return nil, fmt.Errorf("the %s of backend %s has no value of its kind, or a value of another kind", r.Kind, key.backend)
		}
		s := Setting{Kind: r.Kind, Health: r.Health, Since: wall(r.Since), Deadline: wall(r.Deadline), Author: r.Author}
		if isWeight {
			s.Weight = *r.Weight
		}
		slices.Sort(r.Sources)
		overrides[key] = Override{Backend: key.backend, Setting: s, Sources: slices.Compact(r.Sources)}
	}
	return overrides, nil
}

func encode(overrides map[overrideKey]Override) ([]byte, error) {
	records := []overrideRecord{}
	for _, o := range listed(overrides) {
		r := overrideRecord{Address: o.Backend.Address, Port: o.Backend.Port, Kind: o.Kind, Health: o.Health,
			Deadline: o.Deadline, Since: o.Since, Author: o.Author, Sources: o.Sources}
		if o.Kind == KindWeight {
			r.Weight = &o.Weight
		}
		records = append(records, r)
	}
	text, err := json.Marshal(records)
	if err != nil {
		return nil, err
	}
	text, err = json.MarshalIndent(overrideDocument{Version: fileVersion, SHA256: sum(text), Overrides: text}, "", "  ")
	return append(text, '\n'), err
}

// save replaces the file. After an error it has the old content or the new one.
func (f *overrideFile) save(overrides map[overrideKey]Override) error {
	text, err := encode(overrides)
	if err != nil {
		return err
	}
	if err := f.disk.MkdirAll(filepath.Dir(f.path)); err != nil {
		return err
	}
	return record.Replace(f.disk, f.path, text)
}
