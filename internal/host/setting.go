// Package host reads and changes the machine, beside programs and network devices: the kernel's settings (sysctl),
// and the namespaces of a process. Settings of net/ are those of the calling thread's network namespace.
package host

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// settings is the folder of the kernel's settings.
const settings = "/proc/sys/"

// Setting is a kernel setting that was changed, or is to be.
type Setting struct {
	// Name is its path below /proc/sys, "net/ipv4/conf/all/arp_ignore".
	Name   string `json:"name"`
	Before string `json:"before"`
	Set    string `json:"set"`
}

// String is "net/ipv4/conf/all/arp_ignore: 0 -> 1".
func (s Setting) String() string { return s.Name + ": " + s.Before + " -> " + s.Set }

// Apply gives the setting its new value.
func (s Setting) Apply() error { return write(s.Name, s.Set) }

// Restore gives settings back their values from before, the last one first. It returns the settings that are left
// to do: none, or the failed ones. A setting that has another value than its change gave it is somebody else's by
// now, and is left alone; so is one that is gone.
func Restore(changed []Setting) (left []Setting, err error) {
	var errs []error
	for _, s := range slices.Backward(changed) {
		now, err := ReadSetting(s.Name)
		if errors.Is(err, os.ErrNotExist) {
			continue // the interface is gone
		}
		if err == nil && now == s.Set {
			err = write(s.Name, s.Before)
		}
		if err != nil {
			left = append(left, s)
			errs = append(errs, err)
		}
	}
	return left, errors.Join(errs...)
}

// ReadSetting reads a setting, by its path below /proc/sys, without the line's end. os.ErrNotExist is in the error
// where the kernel has no such setting.
func ReadSetting(name string) (string, error) {
	text, err := os.ReadFile(settings + name)
	if err != nil {
		return "", fmt.Errorf("read the setting %s: %w", name, err)
	}
	return strings.TrimSpace(string(text)), nil
}

// ReadNumber is ReadSetting of a number.
func ReadNumber(name string) (int, error) {
	text, err := ReadSetting(name)
	if err != nil {
		return 0, err
	}
	value, err := strconv.Atoi(text)
	if err != nil {
		return 0, fmt.Errorf("read the setting %s: %w", name, err)
	}
	return value, nil
}

// Settings are the names that match a pattern, "net/ipv6/conf/*/accept_ra" (path/filepath.Match).
func Settings(pattern string) ([]string, error) {
	paths, err := filepath.Glob(settings + pattern)
	for i, path := range paths {
		paths[i] = strings.TrimPrefix(path, settings)
	}
	return paths, err
}

func write(name, value string) error {
	if err := os.WriteFile(settings+name, []byte(value), 0o644); err != nil {
		return fmt.Errorf("set %s to %s: %w; in a container /proc/sys may be read-only: set it from outside", name, value, err)
	}
	return nil
}
