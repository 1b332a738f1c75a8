package sensor

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Budget keeps the CPU time of the programs of its Sets below a limit. When they exceed it, the Set that took most
// observes one thing of two, then one of four; a Set with the smallest sample closes sensors. A nil Budget has no
// limit. A Budget is for one goroutine.
type Budget struct {
	limit   float64 // percent of one CPU
	members []*member
	stats   io.Closer
	began   time.Time
	last    time.Time
	took    time.Duration // since the beginning
	changes []string
	atEnd   bool // the caller was told that no sensor is left to close
}

// Member is a Set with a limit, and the means to make it take less.
type Member struct {
	Set *Set
	// Unit names an observed thing, in the singular, and SampleMax is the N of the smallest sample 1/N, a power of 2.
	// 0: there are no samples.
	Unit      string
	SampleMax uint32
	Sample    uint32 // N at the beginning; 0 stands for 1
	// Resample makes the programs observe one thing of so many from now on.
	Resample func(one uint32) error
	// Rises: the sample becomes larger again when the programs take much less than the limit.
	Rises bool
	// Note is added to the sentence that reports another sample.
	Note string
	// Sheds are the names of sensors that may be closed, the first one first. Each has a text in Without.
	Sheds []string
}

// member is a Member with its costs.
type member struct {
	Member
	ran  map[string]Cost // by sensor, at the last call
	took time.Duration   // since the last call
}

// Spending is the CPU time of the programs since the last call, and the Budget's answer.
type Spending struct {
	Percent float64 `json:"sensors_cpu_percent"` // of one CPU
	Change  string  `json:"budget,omitempty"`    // a sentence; "": nothing was changed
	AtEnd   bool    `json:"-"`                   // the limit is exceeded, and nothing is left to change; true once
}

// NewBudget begins to count. The limit is in percent of one CPU, for all members together. For a limit of 0 there is no
// Budget.
func NewBudget(percent float64, members ...Member) (*Budget, error) {
	if percent <= 0 {
		return nil, nil
	}
	stats, err := ebpf.EnableStats(uint32(unix.BPF_STATS_RUN_TIME))
	if err != nil {
		return nil, fmt.Errorf("make the kernel measure the sensors' CPU time, for the budget: %w", err)
	}
	b := &Budget{limit: percent, stats: stats, began: time.Now(), last: time.Now()}
	for _, m := range members {
		m.Sample = max(1, m.Sample)
		one := &member{Member: m}
		if one.ran, err = m.Set.Costs(); err != nil {
			return nil, fmt.Errorf("%w; %w", err, b.Close())
		}
		b.members = append(b.members, one)
	}
	return b, nil
}

// Keep reads the CPU time of the programs since the last call, and makes them take less if it is above the limit. Its
// calls are some seconds apart.
func (b *Budget) Keep() (*Spending, error) {
	if b == nil {
		return nil, nil
	}
	now := time.Now()
	all := time.Duration(0)
	for _, m := range b.members {
		ran, err := m.Set.Costs()
		if err != nil {
			return nil, err
		}
		m.took = 0
		for name, c := range ran {
			m.took += c.Took - m.ran[name].Took
		}
		m.ran = ran
		all += m.took
	}
	s := &Spending{Percent: 100 * float64(all) / float64(now.Sub(b.last))}
	b.last = now
	b.took += all
	var err error
	switch {
	case s.Percent > b.limit && b.atEnd:
	case s.Percent > b.limit:
		s.Change, err = b.less(s.Percent)
		s.AtEnd = b.atEnd
	case s.Percent < b.limit/4: // with twice the sample, the programs stay far below the limit
		s.Change, err = b.more(s.Percent)
	}
	if s.Change != "" {
		b.changes = append(b.changes, s.Change)
	}
	return s, err
}

// less makes one member take less: the one that took most, of the members that can.
func (b *Budget) less(percent float64) (string, error) {
	var most *member
	for _, m := range b.members {
		if m.canLess() && (most == nil || m.took > most.took) {
			most = m
		}
	}
	said := fmt.Sprintf("the sensors took %.1f %% of a CPU and may take %.1f %%", percent, b.limit)
	switch {
	case most == nil:
		b.atEnd = true
		return said + ", and cannot watch less", nil
	case most.Sample < most.SampleMax:
		return most.resample(said, 2*most.Sample)
	}
	name := most.Sheds[0]
	most.Sheds = most.Sheds[1:]
	without, err := most.Set.shed(name)
	return fmt.Sprintf("%s: the sensor %q is detached, so that from now on %s", said, name, without), err
}

// more makes the first member with a sample observe more again.
func (b *Budget) more(percent float64) (string, error) {
	for _, m := range b.members {
		if m.Rises && m.Sample > 1 {
			b.atEnd = false
			return m.resample(fmt.Sprintf("the sensors took %.1f %% of a CPU and may take %.1f %%", percent, b.limit), m.Sample/2)
		}
	}
	return "", nil
}

// canLess skips sensors that were never attached.
func (m *member) canLess() bool {
	for len(m.Sheds) > 0 && !m.Set.Holds(m.Sheds[0]) {
		m.Sheds = m.Sheds[1:]
	}
	return m.Sample < m.SampleMax || len(m.Sheds) > 0
}

func (m *member) resample(said string, one uint32) (string, error) {
	if err := m.Resample(one); err != nil {
		return "", err
	}
	m.Sample = one
	if one == 1 {
		return said + ": from now on everything is watched again", nil
	}
	return fmt.Sprintf("%s: from now on one %s of %d is watched%s", said, m.Unit, one, m.Note), nil
}

// Total is the spending since the beginning, with all changes.
func (b *Budget) Total() *Spending {
	if b == nil {
		return nil
	}
	return &Spending{100 * float64(b.took) / float64(max(1, b.last.Sub(b.began))), strings.Join(b.changes, "; "), b.atEnd}
}

// Close ends the kernel's counting for this Budget. The Sets stay the caller's.
func (b *Budget) Close() error {
	if b == nil {
		return nil
	}
	return b.stats.Close()
}

// SetSample makes programs observe one thing of so many. It sets their variable to that number less 1; the programs of
// the object read it so.
func (s *Set) SetSample(variable string, one uint32) error {
	v := s.maps.Variables[variable]
	if v == nil {
		return fmt.Errorf("set the sample to 1/%d: the BPF object has no variable %s", one, variable)
	}
	if err := v.Set(one - 1); err != nil {
		return fmt.Errorf("set the sample to 1/%d: %w", one, err)
	}
	return nil
}

// Cost is the work of a sensor's program, added up over all CPUs.
type Cost struct {
	Runs uint64
	Took time.Duration
}

// Costs returns the costs of the attached sensors since Open, by name. The kernel counts them only on request, such as
// a Budget's.
func (s *Set) Costs() (map[string]Cost, error) {
	by := map[string]Cost{}
	for _, h := range s.held {
		stats, err := h.program.Stats()
		if err != nil {
			return nil, fmt.Errorf("read how long the sensor %s has run: %w", h.sensor, err)
		}
		sum := by[h.sensor]
		by[h.sensor] = Cost{sum.Runs + stats.RunCount, sum.Took + stats.Runtime}
	}
	return by, nil
}

// Holds reports whether a sensor is attached: some way worked, and no Budget has closed it.
func (s *Set) Holds(sensor string) bool { return s.find(sensor) >= 0 }

// find returns the sensor's index; -1: the sensor is not attached.
func (s *Set) find(sensor string) int {
	for i, h := range s.held {
		if h.sensor == sensor {
			return i
		}
	}
	return -1
}

// shed closes an attached sensor, and returns the text about a tool without it.
func (s *Set) shed(sensor string) (without string, err error) {
	at := s.find(sensor)
	h := s.held[at]
	if s.gone == nil {
		s.gone = map[string]uint64{}
	}
	stats, err := h.program.Stats()
	if err != nil {
		return "", fmt.Errorf("read how often the sensor %s was not run: %w", sensor, err)
	}
	s.gone[sensor] = stats.RecursionMisses
	s.held = append(s.held[:at:at], s.held[at+1:]...)
	err = h.link.Close()
	h.collection.Close()
	for _, r := range s.Results {
		if r.Sensor.Name == sensor {
			without = r.Sensor.Without
		}
	}
	return cmp.Or(without, "it is not watched"), err
}
