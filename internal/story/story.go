// Package story tells a demo's story: step by step, with claims about shunt that are checked in the same
// run. The claims are values too, for a demo's JSON.
package story

import (
	"context"
	"fmt"
	"io"
	"strings"
)

// Claim is one statement of a demo about shunt, and whether it was true.
type Claim struct {
	Step string `json:"step"`
	Text string `json:"text"`
	True bool   `json:"true"`
}

// Claims are the claims of one run.
type Claims []Claim

// Untrue counts the claims that were not true.
func (c Claims) Untrue() (n int) {
	for _, one := range c {
		if !one.True {
			n++
		}
	}
	return n
}

// Verdict is the story's end, for a run that took so long. It repeats the claims that were not true,
// which a reader of a long story, or of its end alone, would have to look for.
func (c Claims) Verdict(seconds float64) string {
	n := c.Untrue()
	if n == 0 {
		return fmt.Sprintf("All %d claims were true, in %.1f s.", len(c), seconds)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d of %d claims were NOT TRUE, in %.1f s:", n, len(c), seconds)
	for _, one := range c {
		if !one.True {
			fmt.Fprintf(&b, "\n  ✘ %s: %s", one.Step, one.Text)
		}
	}
	return b.String()
}

// Teller tells the story of one run. It is for one goroutine.
type Teller struct {
	Out    io.Writer
	Claims Claims
	step   string
}

// NewTeller tells to out; its claims are none, and not nil.
func NewTeller(out io.Writer) *Teller { return &Teller{Out: out, Claims: Claims{}} }

// Begin writes the title of a step. Claims belong to it until the next one.
func (t *Teller) Begin(step string) {
	t.step = step
	t.Say("\n── %s\n\n", step)
}

// Part is a step of a story, with its title.
type Part struct {
	title string
	do    func(context.Context) error
}

// Step returns a part with a title.
func Step(title string, do func(context.Context) error) Part { return Part{title, do} }

// Tell tells parts in their order, until one fails or the context ends. The error is the reason of the
// end.
func (t *Teller) Tell(ctx context.Context, parts ...Part) error {
	for _, part := range parts {
		t.Begin(part.title)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := part.do(ctx); err != nil {
			return err
		}
	}
	return nil
}

// Say tells the reader. A signal reveals a reader who has gone away.
func (t *Teller) Say(format string, args ...any) { fmt.Fprintf(t.Out, format, args...) }

// Claim states a claim, with the finding, and whether it is true.
func (t *Teller) Claim(ok bool, format string, args ...any) {
	c := Claim{Step: t.step, Text: fmt.Sprintf(format, args...), True: ok}
	t.Claims = append(t.Claims, c)
	sign := "✔"
	if !ok {
		sign = "✘ NOT TRUE:"
	}
	t.Say("  %s %s\n", sign, c.Text)
}

// Indent returns a text as a block within a story: each line two columns to the right, without the last
// line's end.
func Indent(text string) string {
	return "  " + strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n  ")
}

// Found completes a claim that nothing is left: it returns the list of the items that were found, or "".
func Found(items []string) string {
	if len(items) == 0 {
		return ""
	}
	return ": found " + strings.Join(items, ", ")
}
