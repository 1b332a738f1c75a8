package baseline

import (
	"fmt"
	"path"
	"strings"
)

// sshdIncludesMax is OpenSSH's own limit of nested Include (servconf.c: SERVCONF_MAX_DEPTH).
const sshdIncludesMax = 16

// sshdFilesMax ends the reading of files that include each other, which would take hours.
const sshdFilesMax = 1000

// sshdReader finds a key in sshd_config(5): Include is read in its place, in the order of names, and a Match block
// in an included file ends with that file.
type sshdReader struct {
	tree   *tree
	folder string // folder of relative patterns of Include
	key    string
	files  int // number of files read so far
	found  []assignment
}

func (r *sshdReader) file(where string, content []byte, match bool, depth int) error {
	if depth > sshdIncludesMax {
		return fmt.Errorf("read %s: more than %d Include inside each other", where, sshdIncludesMax)
	}
	if r.files++; r.files > sshdFilesMax {
		return fmt.Errorf("read %s: Include names too many files, of which this is number %d", where, r.files)
	}
	outer := match
	for i, line := range strings.Split(string(content), "\n") {
		words := sshdWords(line)
		if len(words) == 0 {
			continue
		}
		switch {
		case strings.EqualFold(words[0], "match"):
			match = outer || len(words) != 2 || !strings.EqualFold(words[1], "all")
		case strings.EqualFold(words[0], "include"):
			for _, pattern := range words[1:] {
				if !path.IsAbs(pattern) {
					pattern = path.Join(r.folder, pattern)
				}
				if err := r.include(pattern, match, depth); err != nil {
					return err
				}
			}
		case strings.EqualFold(words[0], r.key):
			r.found = append(r.found, assignment{file: where, line: i, key: words[0], value: strings.Join(words[1:], " "), match: match})
		}
	}
	return nil
}

func (r *sshdReader) include(pattern string, match bool, depth int) error {
	files, err := r.tree.glob(pattern)
	if err != nil {
		return err
	}
	for _, file := range files {
		content, where, err := r.tree.read(file)
		if err != nil {
			return err
		}
		if err := r.file(where, content, match, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// sshdWords returns the words of a line: the key ends at a space or =, words may be in double quotes, # begins a comment.
func sshdWords(line string) (words []string) {
	line = strings.TrimSpace(line)
	for line != "" && line[0] != '#' {
		var word string
		if line[0] == '"' {
			word, line, _ = strings.Cut(line[1:], `"`)
		} else {
			ends := " \t"
			if len(words) == 0 {
				ends = " \t="
			}
			end := strings.IndexAny(line, ends)
			if end < 0 {
				end = len(line)
			}
			word, line = line[:end], line[end:]
		}
		words = append(words, word)
		line = strings.TrimLeft(line, " \t\r")
		if len(words) == 1 {
			line = strings.TrimLeft(strings.TrimPrefix(line, "="), " \t")
		}
	}
	return words
}
