package suite

import (
	"fmt"
	"io"
	"regexp"
	"strings"
)

// heldMax is the number of lines of a test that are kept until it passes or fails.
const heldMax = 400

// Progress is a writer for the output of `go test -v` that passes on the lines for a person
// who waits: a line for each test that ended, the whole output of a failed test, and all
// output that is no test's log, such as a panic or the kernel's messages.
type Progress struct {
	to      io.Writer
	lines   lines
	current string              // the test that prints
	held    map[string][]string // lines of tests that have not ended
}

// NewProgress writes to another writer, indented.
func NewProgress(to io.Writer) *Progress {
	return &Progress{to: to, held: map[string][]string{}}
}

// speaker matches a line that names the test whose log follows.
var speaker = regexp.MustCompile(`^=== (?:RUN|PAUSE|CONT|NAME) +(\S*)`)

func (p *Progress) Write(text []byte) (int, error) {
	p.lines.add(text, func(line []byte) { p.line(string(line)) })
	return len(text), nil
}

func (p *Progress) line(line string) {
	if m := speaker.FindStringSubmatch(line); m != nil {
		p.current = m[1]
		return
	}
	if m := verdict.FindStringSubmatch(line); m != nil {
		if m[2] == "FAIL" {
			for _, said := range p.held[m[3]] {
				fmt.Fprintln(p.to, "    "+said)
			}
		}
		delete(p.held, m[3])
		if m[2] != "PASS" || m[1] == "" {
			fmt.Fprintln(p.to, "    "+line)
		}
		return
	}
	if strings.HasPrefix(line, "    ") {
		if said := p.held[p.current]; len(said) < heldMax {
			p.held[p.current] = append(said, line)
		}
		return
	}
	if line != "" {
		fmt.Fprintln(p.to, "    "+line)
	}
}
