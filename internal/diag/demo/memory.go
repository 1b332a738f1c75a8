package demo

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
)

const (
	keptEvents = 600
	keptRate   = 200.0 // a second
	keptBy     = "eventfd"
)

// Memory is the memory that is taken and not given back, and the findings of `shunt diag memleak`.
type Memory struct {
	Kept     int      `json:"kept"` // descriptors, each with an allocation in each row
	Growing  int      `json:"told_growing"`
	Innocent int      `json:"told_innocent"` // growing rows of other processes
	Cache    string   `json:"told_cache"`    // of the row that grows fastest, and so on
	Live     uint64   `json:"told_live"`
	Growth   float64  `json:"told_growth_per_second"`
	Stack    []string `json:"told_stack"`
}

func (d *demo) growingMemory(ctx context.Context) error {
	path, remove, err := lab.MakeCgroup("shunt-" + d.id)
	if err != nil {
		return err
	}
	d.atEnd(func() error { return removeEmptied(remove) })
	group, err := os.Open(path)
	if err != nil {
		return err
	}
	d.atEnd(group.Close)
	w, err := d.hire(ctx, Order{Name: "demo-keeper", Count: keptEvents, Rate: keptRate}, func(c *exec.Cmd) {
		c.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(group.Fd())}
	})
	if err != nil {
		return err
	}
	d.Say("  The process demo-keeper, in a cgroup of its own, makes %.0f event descriptors a second,\n  %d in all, and closes none: the kernel has to keep memory for each.\n\n", keptRate, keptEvents)
	t, err := d.begin(ctx, nil, "memleak", "--cgroup", path, "--interval", "250ms", "--top", "0", "--duration", atMost)
	if err != nil {
		return err
	}
	if err := w.work(); err != nil {
		return err
	}
	r, err := w.report(ctx)
	if err != nil {
		return err
	}
	m := &d.facts.Memory
	m.Kept, m.Stack = r.Count, []string{}
	if err := t.end(ctx, d.readMemleak); err != nil {
		return err
	}
	d.Say("\n  It says: %d rows grow, the fastest by %.0f allocations a second; %d are live, in %s, by\n", m.Growing, m.Growth, m.Live, m.Cache)
	for _, frame := range m.Stack[:min(len(m.Stack), 8)] {
		d.Say("    %s\n", frame)
	}
	d.Say("\n")
	d.Claim(m.Growing > 0 && m.Innocent == 0, "memleak finds what grows, and who: %s is in the stack of each of the %d rows that grow", keptBy, m.Growing)
	d.Claim(m.Live == uint64(m.Kept), "memleak counts the %d allocations of the fastest one, one for each descriptor, exactly", m.Live)
	return nil
}

// removeEmptied removes a cgroup whose last process has ended: the kernel may need a moment to notice.
func removeEmptied(remove func() error) error {
	for end := time.Now().Add(endsWithin); ; {
		err := remove()
		if !errors.Is(err, unix.EBUSY) || time.Now().After(end) {
			return err
		}
		time.Sleep(time.Millisecond)
	}
}

func (d *demo) readMemleak(kind string, text []byte) error {
	if kind != "summary" {
		return nil
	}
	var line struct {
		Rows []struct {
			Kind, Cache, State string
			Live               uint64
			Growth             float64 `json:"growth_per_second"`
			Stack              []string
		}
	}
	if err := json.Unmarshal(text, &line); err != nil {
		return err
	}
	m := &d.facts.Memory
	for _, r := range line.Rows {
		if r.State != "growing" {
			continue
		}
		if m.Growing++; m.Growing == 1 {
			m.Cache, m.Live, m.Growth, m.Stack = r.Kind, r.Live, r.Growth, r.Stack
			if r.Cache != "" {
				m.Cache = r.Cache
			}
		}
		if !slices.ContainsFunc(r.Stack, func(f string) bool { return strings.Contains(f, keptBy) }) {
			m.Innocent++
		}
	}
	return nil
}
