package suite

import (
	"fmt"
	"io"
	"regexp"
	"strings"
)

// heldMax is how many lines of a test are kept until it is known whether it fails.
const heldMax = 400

// Progress is a writer for the output of `go test -v` that passes on what a person who
// waits wants to read: a line for each test that ended, the whole output of a failed test, and
// everything that is no test's log, such as a panic or the kernel's messages.
type Progress struct {
	to      io.Writer
	lines   lines
	current string              // the test that speaks
	held    map[string][]string // what tests that have not ended have said
}

// NewProgress writes to another writer, indented.
func NewProgress(to io.Writer) *Progress {
	return &Progress{to: to, held: map[string][]string{}}
}

// speaker is a line that says whose log follows.
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
