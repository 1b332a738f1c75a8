package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// life is the time for which a record counts. Tests can see more of a machine than a key has, for example the
// date.
const life = 7 * 24 * time.Hour

// record belongs to a package that passed. It is a file whose name is the key.
type record struct {
	Package string
	Passed  time.Time
	Output  string // of go test, without its last line
	Seen    []seen
}

// folder returns the folder of records, and makes it if it is missing. It removes records that no longer count.
func folder() (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "shunt", "passed")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", err
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > life {
			_ = os.Remove(filepath.Join(dir, e.Name())) // another run may have removed it
		}
	}
	return dir, nil
}

// read returns the record of a key. It is an error if there is none.
func read(dir, key string, now time.Time) (*record, error) {
	text, err := os.ReadFile(filepath.Join(dir, key))
	if errors.Is(err, os.ErrNotExist) {
		return nil, errors.New("there is no record that it passed with these files on this machine")
	}
	if err != nil {
		return nil, err
	}
	var r record
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, err
	}
	if age := now.Sub(r.Passed); age > life || age < 0 {
		return nil, errors.New("it passed too long ago")
	}
	return &r, nil
}

// record records that a package passed, if the log of its tests is complete.
func (s *session) record(p *testee, output, log string) error {
	all, err := s.look(log, p.Dir)
	if err != nil {
		return err
	}
	for _, name := range p.files {
		if err := s.settled(name); err != nil {
			return err
		}
	}
	for i := range all {
		if all[i].Kind == file {
			if err := s.settled(filepath.Join(s.root, all[i].Name)); err != nil {
				return err
			}
		}
		if all[i].Digest, err = s.now(all[i]); err != nil {
			return err
		}
	}
	text, err := json.Marshal(record{Package: p.Path, Passed: s.began, Output: output, Seen: all})
	if err != nil {
		return err
	}
	part, err := os.CreateTemp(s.records, "part-")
	if err != nil {
		return err
	}
	_, err = part.Write(text)
	if err = errors.Join(err, part.Close()); err == nil {
		err = os.Rename(part.Name(), filepath.Join(s.records, p.key))
	}
	if err != nil {
		return fmt.Errorf("record that it passed: %w", errors.Join(err, os.Remove(part.Name())))
	}
	return nil
}

// last matches the line with which go test ends a package.
var last = regexp.MustCompile(`^(ok  |FAIL|\?   )\t(\S+)`)

// passes reads go test's output and calls found for each package that passed, with its output.
func passes(out io.Reader, found func(path, output string)) error {
	var output strings.Builder
	for lines := bufio.NewReader(out); ; {
		line, err := lines.ReadString('\n')
		if match := last.FindStringSubmatch(line); match != nil {
			if match[1] == "ok  " {
				found(match[2], output.String())
			}
			output.Reset()
		} else {
			output.WriteString(line)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
