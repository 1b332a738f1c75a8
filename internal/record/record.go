// Package record keeps small files that say what shunt has changed on the machine, so that
// another process can put it back. They lie in a folder that is emptied when the machine starts,
// as are the changes they are about; so they outlive a kill, and need not outlive a loss of power.
package record

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
)

// Read fills value with what was written last. Without a file it leaves value as it is.
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

// Write replaces the file in one step: a kill leaves the old one or the new one. One caller at
// a time.
func Write(path string, value any) error {
	text, err := json.Marshal(value)
	if err != nil {
		return err
	}
	fresh := path + ".new"
	if err := os.WriteFile(fresh, text, 0o600); err != nil {
		return err
	}
	return os.Rename(fresh, path)
}

// Remove takes the file away. That there is none is success.
func Remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
