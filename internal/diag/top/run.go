package top

import (
	"context"
	"encoding/json"
	"errors"
	stdio "io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/diag/lasting"
	"github.com/shunt-lb/shunt/internal/diag/line"
	"github.com/shunt-lb/shunt/sensor"
)

// Run shows a screen each interval until the context ends, and then the counts of the streams of events: as text or,
// with asJSON, as one object a line. Text without a terminal ends after one screen.
func Run(ctx context.Context, o Options, asJSON bool, out stdio.Writer) (err error) {
	var p printer = jsonLines{json.NewEncoder(out)}
	if !asJSON {
		_, _, is := terminal(out)
		o.Once = o.Once || !is
		// It is read for each screen, because the window may be resized.
		size := func() (int, int) {
			columns, lines, _ := terminal(out)
			return columns, lines
		}
		p = &text{out: out, size: size, threshold: o.Threshold, redraws: !o.Once}
	}
	c, err := open(o, parts)
	if err != nil {
		return err
	}
	closed := false
	defer func() {
		if !closed {
			_, failed := c.close()
			err = errors.Join(err, failed)
		}
	}()
	ctx, cancel := lasting.For(ctx, o.Duration)
	defer cancel()
	if err := p.start(c.results, o.BTF.From); err != nil {
		return err
	}
	for {
		interval, cancel := context.WithTimeout(ctx, o.Interval)
		s, err := c.screen(interval)
		cancel()
		if err != nil {
			return err
		}
		if err := p.screen(s); err != nil {
			return err
		}
		if o.Once || ctx.Err() != nil {
			break
		}
	}
	closed = true
	s, err := c.close()
	if err != nil {
		return err
	}
	return p.summary(s)
}

// terminal returns the size of the terminal. Without a terminal, or if it does not report its size, it is the size of a screen
// that fits everywhere.
func terminal(out stdio.Writer) (columns, lines int, is bool) {
	f, is := out.(*os.File)
	if !is {
		return screenColumns, screenLines, false
	}
	size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ)
	if err != nil || size.Col == 0 || size.Row == 0 {
		return screenColumns, screenLines, err == nil
	}
	return int(size.Col), int(size.Row), true
}

// printer writes the findings of a run.
type printer interface {
	start(results []sensor.Result, btf string) error
	screen(Screen) error
	summary(Summary) error
}

// jsonLines writes for programs: one object a line, each with its type.
type jsonLines struct{ out *json.Encoder }

type screenLine struct {
	Type string `json:"type"` // screen
	Screen
}

type summaryLine struct {
	Type string `json:"type"` // summary
	Summary
}

func (p jsonLines) start(results []sensor.Result, btf string) error {
	return p.out.Encode(line.NewStart(results, btf))
}

func (p jsonLines) screen(s Screen) error { return p.out.Encode(screenLine{"screen", s}) }

func (p jsonLines) summary(s Summary) error { return p.out.Encode(summaryLine{"summary", s}) }
