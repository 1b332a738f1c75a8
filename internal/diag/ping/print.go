package ping

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/shunt-lb/shunt/internal/diag/line"
	"github.com/shunt-lb/shunt/sensor"
)

// Printer reports a client's run.
type Printer struct {
	Out   io.Writer
	JSON  bool
	Log   io.Writer     // for text: probes are printed there and not to Out; nil: to Out
	Above time.Duration // probes with a round trip up to this are not reported, except lost ones
	Image *Image        // draws all probes, reported or not; nil: none

	hidden  uint64
	lines   *bufio.Writer // where probes are printed; nil: none was reported
	encoder *json.Encoder // for JSON
	text    []byte        // of the last probe
}

type startLine struct {
	line.Start
	Server   string  `json:"server,omitempty"`
	Bytes    int     `json:"bytes,omitempty"`
	Interval float64 `json:"interval_us,omitempty"`
	Mode     Mode    `json:"mode,omitempty"`
}

type probeLine struct {
	Type string `json:"type"` // probe
	Probe
}

type summaryLine struct {
	Type string `json:"type"` // summary
	Summary
	Hidden uint64 `json:"probes_not_shown"`
}

type clientLine struct {
	Type    string     `json:"type"` // client
	Client  netip.Addr `json:"client"`
	Session string     `json:"session"`
}

type servedLine struct {
	Type string `json:"type"` // summary
	Served
}

func newStart(results []sensor.Result, types sensor.BTF, o *Options) startLine {
	l := startLine{Start: line.NewStart(results, types.From)}
	if o != nil {
		l.Server, l.Bytes, l.Interval, l.Mode = o.Server.String(), o.Bytes, float64(o.Interval)/1e3, cmp.Or(o.Mode, ModeAuto)
	}
	return l
}

func startText(out io.Writer, results []sensor.Result, types sensor.BTF) error {
	for _, r := range results {
		fmt.Fprintln(out, r)
	}
	_, err := fmt.Fprintf(out, "types: %s\n", types.From)
	return err
}

func (p *Printer) start(results []sensor.Result, o Options) error {
	if p.JSON {
		return json.NewEncoder(p.Out).Encode(newStart(results, o.BTF, &o))
	}
	if err := startText(p.Out, results, o.BTF); err != nil {
		return err
	}
	_, err := fmt.Fprintf(p.Out, "\nprobes of %d bytes to %v every %v; times in µs\n", o.Bytes, o.Server, o.Interval)
	return err
}

func (p *Printer) probe(v Probe) error {
	if p.Image != nil {
		p.Image.Add(v)
	}
	if !v.Lost && v.RoundTrip <= p.Above.Nanoseconds() {
		p.hidden++
		return nil
	}
	if p.lines == nil {
		out := p.Out
		if p.Log != nil && !p.JSON {
			out = p.Log
		}
		p.lines = bufio.NewWriterSize(out, linesBytes)
		p.encoder = json.NewEncoder(p.lines)
	}
	if p.JSON {
		return p.encoder.Encode(probeLine{"probe", v})
	}
	p.text = append(v.append(p.text[:0]), '\n')
	for _, place := range v.Places {
		p.text = fmt.Appendf(p.text, "  %s µs  %v\n", us(place.Ns), place)
	}
	if p.lines.Available() < len(p.text) { // a log is never cut within a line
		if err := p.lines.Flush(); err != nil {
			return err
		}
	}
	_, err := p.lines.Write(p.text)
	return err
}

// linesBytes has room for some hundred probes, which are written together.
const linesBytes = 64 << 10

// flush writes the probes that were reported.
func (p *Printer) flush() error {
	if p.lines == nil {
		return nil
	}
	return p.lines.Flush()
}

// us returns a time in µs.
func us(ns int64) string { return string(appendUs(nil, ns)) }

func appendUs(b []byte, ns int64) []byte { return strconv.AppendFloat(b, float64(ns)/1e3, 'f', 1, 64) }

const noReport = "; no report of the server"

// unreported: a server had the probe, and has not reported it.
func (p Probe) unreported() bool {
	return !p.Reported && (p.Balancer == nil || p.Balancer.Verdict != verdictAnswer)
}

// String returns the probe as one line.
func (p Probe) String() string { return string(p.append(nil)) }

// append adds the balancer's verdict, reason and clock.
func (v Balancer) append(b []byte) []byte {
	b = append(append(append(append(b, "; balancer at "...), v.Hook...), ' '), v.Verdict...)
	if v.Reason != "" {
		b = append(append(b, ' '), v.Reason...)
	}
	if v.Clock != nil {
		b = appendUs(append(b, ", clock "...), v.Clock.OffsetNs)
		b = appendUs(append(b, " ± "...), v.Clock.ErrorNs)
	}
	return v.appendOthers(b)
}

// appendOthers adds the number of stamps of other balancers, which are not shown.
func (v Balancer) appendOthers(b []byte) []byte {
	if v.Others == 0 {
		return b
	}
	return strconv.AppendUint(append(b, "; stamps of other programs of shunt that are not shown: "...), uint64(v.Others), 10)
}

// String returns the place and the reason of the drop.
func (d Drop) String() string {
	switch d.Verdict {
	case verdictDrop:
		return fmt.Sprintf("the %s's program dropped it: %s", d.Host, d.Reason)
	case verdictAnswer:
		return fmt.Sprintf("the %s's program answered it: %s", d.Host, d.Reason)
	}
	return fmt.Sprintf("the kernel of the %s dropped it: %s", d.Host, d.Reason)
}

// key returns the key of equal drops in a summary: "server, QDISC_DROP".
func (d Drop) key() string { return d.Host + ", " + d.Reason }

// append adds the probe's line, without its end.
func (p Probe) append(b []byte) []byte {
	b = p.Time.AppendFormat(b, "15:04:05.000000 ")
	b = append(strconv.AppendUint(b, p.Sequence, 10), ": "...)
	if p.Lost {
		b = append(append(b, "LOST, last seen at: "...), p.Last...)
		switch {
		case p.Drop != nil:
			b = append(append(b, "; "...), p.Drop.String()...)
		case p.NotSent != "":
			b = append(append(b, "; not sent: "...), p.NotSent...)
		case p.unreported():
			b = append(b, noReport...)
		}
		if p.Balancer != nil {
			b = p.Balancer.appendOthers(b)
		}
		return b
	}
	b = append(appendUs(b, p.RoundTrip), " ="...)
	for i := range p.Stages {
		b = append(append(b, ' '), p.Stages[i].Name...)
		b = appendUs(append(b, ' '), p.Stages[i].Ns)
	}
	if p.Clock != nil {
		b = appendUs(append(b, "; clock "...), p.Clock.OffsetNs)
		b = appendUs(append(b, " ± "...), p.Clock.ErrorNs)
	}
	if p.Balancer != nil {
		b = p.Balancer.append(b)
	}
	if p.unreported() && !p.Unasked {
		b = append(b, noReport...)
	}
	if p.Forgotten {
		b = append(b, "; the stages of this host were overwritten by newer probes"...)
	}
	if !p.AddsUp {
		b = append(b, "; the stages do not add up: some are not in order"...)
	}
	return b
}

func (p *Printer) summary(s Summary) error {
	if err := p.flush(); err != nil {
		return err
	}
	if p.JSON {
		return json.NewEncoder(p.Out).Encode(summaryLine{"summary", s, p.hidden})
	}
	fmt.Fprintf(p.Out, "\n%d sent, %d answered, %d lost (%.2f %%)", s.Sent, s.Answered, s.Lost, s.LostPercent())
	if p.hidden > 0 {
		fmt.Fprintf(p.Out, "; %d not shown", p.hidden)
	}
	fmt.Fprintln(p.Out)
	if s.Answered > 0 {
		if err := p.stages(s); err != nil {
			return err
		}
	}
	for _, note := range s.notes() {
		fmt.Fprintln(p.Out, note)
	}
	return nil
}

func (p *Printer) stages(s Summary) error {
	fmt.Fprintf(p.Out, "round trip: median %s, p99 %s, max %s\n\n", us(s.RoundTrip.Median), us(s.RoundTrip.P99), us(s.RoundTrip.Max))
	w := tabwriter.NewWriter(p.Out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "STAGE\tPROBES\tMEDIAN µs\tP99\tMAX\tLONGEST IN")
	for _, l := range s.Stages {
		fmt.Fprintf(w, "%s\t%d\t%s\t%s\t%s\t%d\n", l.Name, l.Probes, us(l.Median), us(l.P99), us(l.Max), l.Longest)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(p.Out)
	if s.Clock != nil {
		fmt.Fprintf(p.Out, "clock: the server's is %s µs ahead, ± %s", us(s.Clock.OffsetNs), us(s.Clock.ErrorNs))
		if s.Drift != nil {
			fmt.Fprintf(p.Out, "; it gains %.2f µs a second, ± %.2f", s.Drift.PPM, s.Drift.ErrorPPM)
		}
		fmt.Fprintln(p.Out)
	}
	return nil
}

// Spread describes times in ns.
type Spread struct {
	Median int64 `json:"median_ns"`
	P99    int64 `json:"p99_ns"`
	Max    int64 `json:"max_ns"`
}

// StageSpread describes a stage over all probes that have it.
type StageSpread struct {
	Name   string `json:"stage"`
	Probes uint64 `json:"probes"`
	Spread
	Longest uint64 `json:"longest_in"` // number of probes of which it is the longest stage
}

// Drift is the rate by which the server's clock gains, in millionths.
type Drift struct {
	PPM      float64 `json:"ppm"`
	ErrorPPM float64 `json:"error_ppm"`
}

// Summary sums up a whole run.
type Summary struct {
	Sent          uint64            `json:"sent"`
	Answered      uint64            `json:"answered"`
	Lost          uint64            `json:"lost"`
	Unreported    uint64            `json:"unreported"`      // answered, without a report of the server
	Unasked       uint64            `json:"not_awaited"`     // of these: the client did not wait for the report, because of --mode
	Disordered    uint64            `json:"do_not_add_up"`   // answered, with a stage that is negative
	Forgotten     uint64            `json:"forgotten"`       // answered, but this host's stages were overwritten
	Duplicates    uint64            `json:"duplicates"`      // answers to a probe that had one already, or was lost
	BrokenReports uint64            `json:"broken_reports"`  // of the server
	Jumps         int               `json:"clock_jumps"`     // times that a clock jumped
	OtherStamps   uint64            `json:"other_stamps"`    // of balancers, without a place in their probe's account
	LateStamps    uint64            `json:"late_stamps"`     // of balancers, which came after their probe was reported
	Tellers       []Teller          `json:"balancers"`       // hosts that reported stamps
	LostAt        map[string]uint64 `json:"lost_last_seen"`  // lost probes by the last point seen
	Drops         map[string]uint64 `json:"lost_by_kernel"`  // lost probes by host and reason, including those of a balancer's program
	RoundTrip     Spread            `json:"round_trip"`      //
	Stages        []StageSpread     `json:"stages"`          //
	Clock         *Clock            `json:"clock,omitempty"` //
	Drift         *Drift            `json:"drift,omitempty"` // after at least four seconds
	NotRun        map[string]uint64 `json:"not_run"`         // times that the kernel did not run a sensor
}

// LostPercent returns the percentage of lost probes.
func (s Summary) LostPercent() float64 {
	if s.Sent == 0 {
		return 0
	}
	return 100 * float64(s.Lost) / float64(s.Sent)
}

func (s Summary) notes() (notes []string) {
	for _, at := range slices.Sorted(maps.Keys(s.LostAt)) {
		notes = append(notes, fmt.Sprintf("%d lost ones were seen last at: %s", s.LostAt[at], at))
	}
	for _, drop := range slices.Sorted(maps.Keys(s.Drops)) {
		notes = append(notes, fmt.Sprintf("%d lost ones were dropped: %s", s.Drops[drop], drop))
	}
	for _, n := range []struct {
		count uint64
		text  string
	}{
		{s.Unreported - s.Unasked, "answered probes without a report of the server: check that `shunt diag ping -s` runs there"},
		{s.Unasked, "answered probes for whose report shunt did not wait"},
		{s.Disordered, "answered probes whose stages do not add up to the round trip: some are not in order"},
		{s.Forgotten, "answered probes whose stages on this host were overwritten by newer ones"},
		{s.Duplicates, "answers to probes that had one already, or were given up"},
		{s.BrokenReports, "reports of the server that could not be read: use the same version of shunt on both hosts"},
		{s.OtherStamps, "stamps of balancers are not shown: several programs of shunt handled the probes, and each probe shows the stamps of one program"},
		{s.LateStamps, "stamps of balancers came after their probe was printed"},
		{uint64(s.Jumps), "times that a clock jumped"},
	} {
		if n.count > 0 {
			notes = append(notes, fmt.Sprintf("%d %s", n.count, n.text))
		}
	}
	for _, one := range s.Tellers {
		if len(s.Tellers) > 1 {
			notes = append(notes, fmt.Sprintf("%d stamps are of balancers on %v", one.Stamps, one.Address))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.NotRun)) {
		notes = append(notes, fmt.Sprintf("%s: %d packets were not seen, because the sensor was interrupted on its CPU", name, s.NotRun[name]))
	}
	return notes
}

// sum holds the numbers of a summary.
type sum struct {
	s      Summary
	trips  histogram
	stages map[string]*stageSum
}

type stageSum struct {
	histogram
	longest uint64
}

func newSum() *sum {
	return &sum{s: Summary{LostAt: map[string]uint64{}, Drops: map[string]uint64{}, NotRun: map[string]uint64{}, Stages: []StageSpread{}}, stages: map[string]*stageSum{}}
}

func (s *sum) add(p Probe) {
	if p.Lost {
		s.s.Lost++
		s.s.LostAt[p.Last]++
		if p.Drop != nil {
			s.s.Drops[p.Drop.key()]++
		}
		return
	}
	s.s.Answered++
	if p.unreported() {
		s.s.Unreported++
	}
	if p.Unasked {
		s.s.Unasked++
	}
	if !p.AddsUp {
		s.s.Disordered++
	}
	if p.Forgotten {
		s.s.Forgotten++
	}
	if p.Clock != nil {
		if s.s.Clock == nil {
			s.s.Clock = new(Clock)
		}
		*s.s.Clock = *p.Clock
	}
	s.trips.add(p.RoundTrip)
	var longest *stageSum
	longestNs := int64(math.MinInt64)
	for _, stage := range p.Stages {
		one := s.stages[stage.Name]
		if one == nil {
			one = &stageSum{}
			s.stages[stage.Name] = one
		}
		one.add(stage.Ns)
		if stage.Ns > longestNs {
			longest, longestNs = one, stage.Ns
		}
	}
	if longest != nil {
		longest.longest++
	}
}

func (s *sum) summary(c *client, missed map[string]uint64) Summary {
	v := s.s
	v.Sent, v.Duplicates, v.BrokenReports, v.Jumps = c.sent, c.duplicate, c.told, c.clock.jumps
	v.LateStamps, v.OtherStamps = c.lateStamp, c.otherStamp
	v.Tellers = []Teller{}
	for _, one := range c.tellers {
		v.Tellers, v.Jumps = append(v.Tellers, Teller{one.address, one.stamps}), v.Jumps+one.clock.jumps
	}
	v.RoundTrip = s.trips.spread()
	if rate, err, ok := c.clock.drift(); ok {
		v.Drift = &Drift{rate * 1e6, err * 1e6}
	}
	for name, n := range missed {
		if n > 0 {
			v.NotRun[name] = n
		}
	}
	names := slices.SortedFunc(maps.Keys(s.stages), func(a, b string) int {
		if d := stageAt(a) - stageAt(b); d != 0 {
			return d
		}
		return strings.Compare(a, b)
	})
	for _, name := range names {
		one := s.stages[name]
		v.Stages = append(v.Stages, StageSpread{name, one.count, one.spread(), one.longest})
	}
	return v
}
