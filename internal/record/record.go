// Package record keeps small files, each replaced as a whole: shunt's changes of the machine, so that another process
// can undo them, and an operator's overrides. A reader finds the content before or the one after, also where shunt was
// killed or the power went.
package record

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// freshSuffix ends the name of the file that is written before it replaces the record.
const freshSuffix = ".new"

// Read fills value with the last written one. Without a file it leaves value as it is.
func Read(path string, value any) error {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return json.Unmarshal(text, value)
}

// Write replaces the file by one with value. One caller at a time.
func Write(path string, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return Replace(OS, path, text)
}

// Replace replaces the file's contents by text. After an error the file has the new or the old contents. One caller at
// a time.
func Replace(disk Disk, path string, text []byte) (err error) {
	fresh := path + freshSuffix
	file, err := disk.Create(fresh)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = disk.Remove(fresh) // the next one overwrites it anyway
		}
	}()
	_, err = file.Write(text)
	if err == nil {
		err = file.Sync() // otherwise the rename may reach the disk before the text does
	}
	if closed := file.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return err
	}
	if err := disk.Rename(fresh, path); err != nil {
		return err
	}
	return disk.SyncDir(filepath.Dir(path))
}

// Remove removes the file. A missing file is success.
func Remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Sweep removes the files that killed writers have left beside records whose names begin with prefix. Nobody may be writing such a
// record. It is no fault if a file stays: the record's next writer replaces it.
func Sweep(folder, prefix string) {
	entries, _ := os.ReadDir(folder) // without the folder there are none
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) && strings.HasSuffix(e.Name(), freshSuffix) && e.Type().IsRegular() {
			_ = os.Remove(filepath.Join(folder, e.Name()))
		}
	}
}

// Disk has the operations of a file system that Replace and its callers need; tests make it fail.
type Disk interface {
	ReadFile(path string) ([]byte, error)
	MkdirAll(path string) error
	Create(path string) (File, error) // an empty file, readable by its owner alone
	Rename(from, to string) error
	Remove(path string) error
	SyncDir(path string) error // makes a rename in it durable
}

// File is one that is being written.
type File interface {
	io.WriteCloser
	Sync() error
}

// OS is the machine's disk.
var OS Disk = osDisk{}

type osDisk struct{}

func (osDisk) ReadFile(path string) ([]byte, error) { return os.ReadFile(path) }
func (osDisk) MkdirAll(path string) error           { return os.MkdirAll(path, 0o700) }
func (osDisk) Rename(from, to string) error         { return os.Rename(from, to) }
func (osDisk) Remove(path string) error             { return os.Remove(path) }

func (osDisk) Create(path string) (File, error) {
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
