package top

import (
	"cmp"
	"fmt"
	stdio "io"
	"slices"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/diag/io"
	"github.com/shunt-lb/shunt/internal/diag/line"
	"github.com/shunt-lb/shunt/internal/diag/memleak"
	"github.com/shunt-lb/shunt/internal/diag/sched"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

// The size of a screen that fits everywhere.
const (
	screenColumns = 80
	screenLines   = 24
)

// The numbers of rows of the parts below their titles. With titles, the first line and one for the longest stall they fill a screen.
const (
	diskRows    = 3
	ioRows      = 4
	cpuRows     = 2
	waiterRows  = 2
	memoryRows  = 2
	notSeenRows = 2
)

// text writes for people.
type text struct {
	out       stdio.Writer
	size      func() (columns, lines int) // of the screen
	threshold time.Duration
	redraws   bool // each screen is written over the last one
}

// start writes nothing: each screen has the losses of the sensors.
func (p *text) start([]sensor.Result, string) error { return nil }

// Codes of terminals (ECMA-48): move the cursor to the first line; erase from the cursor to the end of the line, and of
// the screen.
const (
	toTop     = "\x1b[H"
	endOfLine = "\x1b[K"
	endOfAll  = "\x1b[J"
)

func (p *text) screen(s Screen) error {
	width, height := p.size()
	all := p.lines(s, width)
	all = all[:min(len(all), height)]
	for i, l := range all {
		all[i] = cut(l, width)
	}
	text := strings.Join(all, "\n") + "\n"
	if p.redraws {
		text = toTop + strings.Join(all, endOfLine+"\n") + endOfLine + endOfAll
	}
	_, err := stdio.WriteString(p.out, text)
	return err
}

func (p *text) summary(s Summary) error {
	var parts []string
	if s.Late != nil {
		parts = append(parts, fmt.Sprintf("waits and stalls: %d received, %d lost, %d missed", s.Late.Received, s.Late.Lost, s.Late.Missed.Total()))
	}
	if s.Names != nil {
		parts = append(parts, fmt.Sprintf("names of files: %d received, %d lost, %d broken", s.Names.Received, s.Names.Lost, s.Names.Broken))
	}
	if s.Confidence != nil {
		parts = append(parts, fmt.Sprintf("memory: %.2f %% of frees were seen", *s.Confidence))
	}
	_, err := fmt.Fprintf(p.out, "\nSummary of %.1f s\n%s\n", s.Seconds, strings.Join(parts, "\n"))
	if err == nil && s.Spending != nil {
		err = line.Spending(p.out, *s.Spending)
	}
	return err
}

// section is a part of the screen: its title, and rows, some of which may not fit.
type section struct {
	name    string
	width   int    // of the first column
	columns string // the rest of the title
	rows    []string
	hidden  int
}

// title appends the number of rows that do not fit to the name.
func (s section) title() string {
	name := s.name
	if s.hidden > 0 {
		name += fmt.Sprintf(" +%d", s.hidden)
	}
	return fmt.Sprintf("%-*s%s", s.width, name, s.columns)
}

// add appends a row if there is room.
func (s *section) add(most int, format string, values ...any) {
	if len(s.rows) == most {
		s.hidden++
		return
	}
	s.rows = append(s.rows, fmt.Sprintf(format, values...))
}

// lines returns at most as many lines as fit on a screen. If the screen is redrawn, each part stays at its position.
func (p *text) lines(s Screen, width int) []string {
	all := []string{fmt.Sprintf("shunt diag top  %s  last %.1f s; the command itself took %.1f %% of a CPU", s.Time.Format("15:04:05"), s.Seconds, s.Command)}
	put := func(most int, part section) {
		all = append(append(all, part.title()), part.rows...)
		for n := len(part.rows); p.redraws && n < most; n++ {
			all = append(all, "")
		}
	}
	if s.IO != nil {
		put(diskRows, disks(*s.IO))
		put(ioRows, files(*s.IO, width))
	}
	if s.Sched != nil {
		put(cpuRows, cpus(*s.Sched))
		put(waiterRows, p.waiters(*s.Sched))
		put(1, p.stalls(*s.Sched))
	}
	if s.Memory != nil {
		put(memoryRows, memory(*s.Memory))
	}
	unseen := section{name: "NOT SEEN"}
	for _, one := range s.NotSeen {
		unseen.add(notSeenRows, "  %s", one)
	}
	if unseen.hidden > 0 {
		unseen.columns = "  (-o json has all)"
	}
	if len(s.NotSeen) > 0 {
		put(notSeenRows, unseen)
	}
	return all
}

func disks(i io.Interval) section {
	s := section{name: "DISK", width: 10, columns: fmt.Sprintf(" %7s %7s %10s %10s %8s %9s %6s", "R/s", "W/s", "READ", "WRITTEN", "WAIT ms", "DEVICE ms", "UTIL%")}
	for _, d := range i.Disks {
		s.add(diskRows, "%s %7.0f %7.0f %10s %10s %8.2f %9.2f %6.1f", field(d.Name, 10), d.ReadRate, d.WriteRate, rate(d.ReadBytes), rate(d.WriteBytes), d.Wait, d.Device, d.Util)
	}
	if len(i.Disks) == 0 {
		s.columns = " no disk had requests"
	}
	return s
}

func rate(bytes float64) string {
	if bytes == 0 {
		return "0"
	}
	return io.Size(bytes) + "/s"
}

// files returns rows by process and file. If a path is too long, its end is shown, which distinguishes files.
func files(i io.Interval, width int) section {
	s := section{name: "IO", width: 16, columns: fmt.Sprintf(" %7s %10s %10s  FILE", "PID", "READ", "WRITTEN")}
	if n := i.UnattributedPercent(); n > 0 {
		s.columns += fmt.Sprintf("  unattributed %.1f %%", n)
	}
	for _, r := range i.Rows {
		comm := r.Comm
		if r.Unattributed {
			comm = "[" + comm + "]"
		}
		line := fmt.Sprintf("%s %7d %10s %10s  ", field(comm, 16), r.PID, rate(float64(r.ReadBytes)/i.Seconds), rate(float64(r.WriteBytes)/i.Seconds))
		s.add(ioRows, "%s%s", line, cutLeft(event.Printable(r.Path), width-columns(line)))
	}
	if len(i.Rows) == 0 {
		s.width, s.columns = 10, " none entered the block layer"
	}
	return s
}

// cpus returns the CPUs for which tasks waited longest in all.
func cpus(i sched.Interval) section {
	s := section{name: "CPU", width: 10, columns: fmt.Sprintf(" %9s %9s %14s %9s", "WAITS/s", "MEAN us", "99 % below us", "RUNNABLE")}
	for _, l := range busiest(i.CPUs) {
		s.add(cpuRows, "%-10d %9.0f %9.1f %14d %9.2f", l.CPU, float64(l.Waits)/i.Seconds, float64(l.MeanNanos)/1e3, l.P99Nanos/1000, l.Runnable)
	}
	return s
}

func (p *text) waiters(i sched.Interval) section {
	s := section{name: "WAITED", width: 16, columns: fmt.Sprintf(" %7s %6s %9s  BEHIND (us)", "TID", "TIMES", "MAX ms")}
	for _, w := range i.Waiters {
		s.add(waiterRows, "%s %7d %6d %9.1f  %s", field(w.Comm, 16), w.TID, w.Waits, millis(w.Longest.Nanos), w.Longest.Reason())
	}
	if len(i.Waiters) == 0 {
		s.width, s.columns = 10, fmt.Sprintf(" no task for a CPU for more than %v", p.threshold)
	}
	return s
}

func (p *text) stalls(i sched.Interval) section {
	s := section{name: "LATE", width: 10, columns: fmt.Sprintf(" by more than %v:", p.threshold)}
	for _, kind := range []sched.Kind{sched.IRQOff, sched.Softirq, sched.Preempt, sched.Steal} {
		s.columns += fmt.Sprintf("  %s %d", kind, i.Kinds[kind])
	}
	if l := i.Longest; l != nil {
		where := l.Softirq
		if where == "" && len(l.Stack) > 0 && l.Kind != sched.Steal {
			where = l.Stack[0]
		}
		s.add(1, "%s", strings.TrimRight(fmt.Sprintf("  the longest: %s %.1f ms on CPU %d, %s/%d  %s", l.Kind, millis(l.Nanos), l.CPU, event.Printable(l.Comm), l.TID, where), " "))
	}
	return s
}

func millis(nanos uint64) float64 { return float64(nanos) / 1e6 }

// memory returns the rows that grow, or may. Other rows are no news.
func memory(i memleak.Interval) section {
	s := section{name: "MEMORY", width: 20, columns: fmt.Sprintf(" %12s %10s  %-11s BY", "GROWTH", "LIVE", "STATE")}
	early := len(i.Rows) == 0
	for _, r := range i.Rows {
		switch r.State {
		case memleak.Early:
			early = true
			continue
		case memleak.Steady:
			continue
		}
		name, by, live := r.Kind.String(), "the stack is not known", r.Bytes
		if r.Cache != "" {
			name += " " + r.Cache
		}
		if len(r.Stack) > 0 {
			by = r.Stack[0]
		}
		if r.Estimate != nil {
			live = r.Estimate.Bytes
		}
		s.add(memoryRows, "%s %12s %10s  %-11s %s", field(name, 20), rate(r.Rate), io.Size(float64(live)), r.State, by)
	}
	s.hidden = max(s.hidden, i.Growing-len(s.rows))
	switch {
	case len(s.rows) > 0:
	case early:
		s.width, s.columns = 10, " too few intervals to tell whether any of the kernel's grows"
	default:
		s.width, s.columns = 10, fmt.Sprintf(" none of the kernel's grows; %d live, a sample of 1/%d", i.Live, i.Sample)
	}
	return s
}

const cutOff = '…'

// columns is the largest possible width of a text. A character from U+1100 on may be two columns wide (Unicode Standard
// Annex #11); the terminal decides about each, so all of them count as two, and no line is too long.
func columns(s string) (n int) {
	for _, r := range s {
		n += columnsOf(r)
	}
	return n
}

func columnsOf(r rune) int {
	if r >= 0x1100 && r != cutOff {
		return 2
	}
	return 1
}

// cut shortens a line that is too long.
func cut(s string, width int) string {
	if columns(s) <= width {
		return s
	}
	room := width - columnsOf(cutOff)
	for i, r := range s {
		if room -= columnsOf(r); room < 0 {
			return s[:i] + string(cutOff)
		}
	}
	return s
}

// cutLeft shortens a line from the left.
func cutLeft(s string, width int) string {
	runes := []rune(s)
	slices.Reverse(runes)
	runes = []rune(cut(string(runes), width))
	slices.Reverse(runes)
	return string(runes)
}

// field is a name in so many columns.
func field(name string, width int) string {
	name = cut(event.Printable(name), width)
	return name + strings.Repeat(" ", max(0, width-columns(name)))
}

// busiest returns the CPUs, first the one for which tasks waited longest in total.
func busiest(all []sched.Load) []sched.Load {
	all = slices.Clone(all)
	slices.SortStableFunc(all, func(a, b sched.Load) int {
		return cmp.Compare(b.Waits*b.MeanNanos, a.Waits*a.MeanNanos)
	})
	return all
}
