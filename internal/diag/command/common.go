package command

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/cli/tool"
	"github.com/spf13/cobra"
)

// percent is a share of one CPU, written as 3% or 3.
type percent float64

func (p *percent) String() string {
	if *p == 0 {
		return "0" // which help does not show as a default
	}
	return strconv.FormatFloat(float64(*p), 'g', -1, 64) + "%"
}

func (p *percent) Type() string { return "percent" }

func (p *percent) Set(text string) error {
	n, err := strconv.ParseFloat(strings.TrimSuffix(text, "%"), 64)
	if err != nil || !(n >= 0 && n <= tool.PercentMax) {
		return errors.New("write percent of one CPU, for example 3%; 0: no limit")
	}
	*p = percent(n)
	return nil
}

func maxCPUFlag(c *cobra.Command, p *percent) {
	c.Flags().Var(p, "max-cpu", "share of one CPU that the sensors may use, for example 3%; if they use more, they watch less, and the output says so; 0: no limit")
}

// diagLog is the file that gets a tool's output instead of standard output.
type diagLog struct {
	path          string
	size, backups int // MiB; renamed logs that are kept
}

func (l *diagLog) flags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&l.path, "log", "", "append the output to this file, instead of printing it")
	f.IntVar(&l.size, "logsize", 100, "size in MiB at which the log is renamed and a new log begins")
	f.IntVar(&l.backups, "logbackup", 3, "number of renamed logs to keep, the newest; 0: all")
}

// write lets the tool write to the log, if there is one, otherwise to out.
func (l *diagLog) write(c *cobra.Command, out io.Writer, run func(io.Writer) error) (err error) {
	switch {
	case l.size < 1 || l.backups < 0:
		return cli.UsageError{Err: errors.New("--logsize must be at least 1, and --logbackup cannot be negative")}
	case l.path == "" && (c.Flags().Changed("logsize") || c.Flags().Changed("logbackup")):
		return cli.UsageError{Err: errors.New("--logsize and --logbackup need --log: give --log, too")}
	case l.path == "":
		return tool.Privileges(run(out))
	}
	log, err := tool.OpenRotated(l.path, 0o644, l.size, l.backups)
	if err != nil {
		return err
	}
	lines := &wholeLines{out: log}
	defer func() { err = errors.Join(err, lines.end(), log.Close()) }()
	return tool.Privileges(run(lines))
}

// wholeLines passes lines on as a whole, so that a log that is renamed between two writes ends with a whole
// line.
type wholeLines struct {
	out  io.Writer
	rest []byte
}

func (w *wholeLines) Write(p []byte) (int, error) {
	w.rest = append(w.rest, p...)
	at := bytes.LastIndexByte(w.rest, '\n') + 1
	if at == 0 {
		return len(p), nil
	}
	if _, err := w.out.Write(w.rest[:at]); err != nil {
		return 0, fmt.Errorf("write the log: %w; a larger --logsize has room for longer lines", err)
	}
	w.rest = append(w.rest[:0], w.rest[at:]...)
	return len(p), nil
}

// end passes on text without an end of line.
func (w *wholeLines) end() error {
	if len(w.rest) == 0 {
		return nil
	}
	_, err := w.out.Write(w.rest)
	return err
}
