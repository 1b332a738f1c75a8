package vdisk

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/shunt-lb/shunt/internal/diag/line"
	"github.com/shunt-lb/shunt/internal/event"
)

// Print writes a report for people, with the slowest requests; slowest is their number, -1: all, by their beginning.
func (r *Report) Print(out io.Writer, slowest int) error {
	r.Recording.printHead(out)
	s := r.Sum
	fmt.Fprintf(out, "\n%d requests%s; followed as far as they went: %d (%s)\n", s.Requests, counts(s.Ops, ": "), s.Joined, percent(s.Joined, s.Requests))
	for _, why := range slices.Sorted(maps.Keys(s.Missing)) {
		fmt.Fprintf(out, "%d not followed: %s\n", s.Missing[why], why)
	}
	fmt.Fprintf(out, "their paths end in%s\n", counts(s.Ends, ": "))
	fmt.Fprintf(out, "offsets in files, against qemu-img map%s\n", counts(s.Offsets, ": "))
	fmt.Fprintf(out, "sectors of disks, against the files' extents%s\n", counts(s.Extents, ": "))
	if s.Total.Max == 0 {
		return nil
	}
	if err := printLayers(out, hostLayers(), s.Layers, s.Total); err != nil {
		return err
	}
	if err := printParts(out, s.Parts, s.Passes); err != nil {
		return err
	}
	return r.printRequests(out, slowest)
}

// printHead writes the subject of the recording, and its losses.
func (rec *Recording) printHead(out io.Writer) {
	if rec.isGuest() {
		fmt.Fprintf(out, "recording inside the guest %s, begun %s\n", event.Printable(rec.Head.Comm), event.Printable(rec.Head.Began))
	} else {
		fmt.Fprintf(out, "recording of %s, process %d, begun %s\n", event.Printable(rec.Head.Comm), rec.Head.PID, event.Printable(rec.Head.Began))
	}
	for _, s := range rec.Head.Sensors {
		if s.Loses != "" {
			way := s.Way
			if way == "" {
				way = "not attached"
			}
			fmt.Fprintf(out, "%s: %s; %s\n", s.Sensor, way, s.Loses)
		}
	}
	for _, note := range rec.notes() {
		fmt.Fprintln(out, event.Printable(note))
	}
	if rec.Tail == nil || rec.isGuest() { // a guest has too many
		return
	}
	for _, f := range rec.Tail.Files {
		fmt.Fprintln(out, event.Printable(f.String()))
	}
}

func counts(by map[string]uint64, before string) string {
	if len(by) == 0 {
		return before + "none"
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(by)) {
		parts = append(parts, fmt.Sprintf("%d %s", by[name], name))
	}
	return before + strings.Join(parts, ", ")
}

func percent(part, all uint64) string {
	return fmt.Sprintf("%.1f %%", 100*float64(part)/float64(max(1, all)))
}

// notes returns the losses of the recording, one sentence each.
func (rec *Recording) notes() []string {
	notes := slices.Clone(rec.Head.Notes)
	if rec.isBare() {
		notes = append(notes, "requests below are those of qemu's files, not of the guest")
	}
	if rec.Cut {
		notes = append(notes, "the file is cut off in the middle of an event")
	}
	t := rec.Tail
	if t == nil {
		return append(notes, "the recorder was killed before it ended the recording, so the positions of images and files are unknown, and also the number of lost events")
	}
	notes = append(notes, t.Notes...)
	notes = append(notes, fmt.Sprintf("%.1f s; %s", t.Seconds, t.Ended))
	if t.Skipped > 0 {
		notes = append(notes, fmt.Sprintf("%d events came when the recording was full", t.Skipped))
	}
	notes = append(notes, fmt.Sprintf("events: %d received, %d lost, %d broken", t.Events.Received, t.Events.Lost, t.Events.Broken))
	if t.Events.Lost > 0 {
		notes = append(notes, "events were lost, so requests may be joined to IO of other requests")
	}
	for _, name := range slices.Sorted(maps.Keys(t.NotRun)) {
		notes = append(notes, fmt.Sprintf("%s: %d were not seen, because the sensor was interrupted on its CPU", name, t.NotRun[name]))
	}
	return notes
}

// String returns one line: the file's role in the machine.
func (f File) String() string {
	text := f.Path
	if f.Format != "" {
		text += ", " + f.Format
	}
	if len(f.Chain) > 1 {
		text += " over " + strings.Join(f.Chain[1:], " over ")
	}
	if f.Direct {
		return text + ", past the page cache"
	}
	return text + ", by the page cache"
}

// printLayers writes the table of layers, in the order of the names.
func printLayers(out io.Writer, names []string, layers map[string]Spread, total Spread) error {
	fmt.Fprintln(out)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "LAYER\tSHARE\tMEAN us\tP50\tP90\tP99\tMAX\tLONGEST IN")
	row := func(name string, s Spread, longest string) {
		fmt.Fprintf(w, "%s\t%.1f %%\t%s\t%s\t%s\t%s\t%s\t%s\n", name, s.Share, micros(s.Mean), micros(s.P50), micros(s.P90), micros(s.P99), micros(s.Max), longest)
	}
	for _, name := range names {
		row(name, layers[name], fmt.Sprint(layers[name].Longest))
	}
	row("all", total, "")
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "most of the time is in the layer %s\n", slow(layers))
	return err
}

func micros(ns uint64) string { return fmt.Sprintf("%.1f", float64(ns)/1000) }

func (r *Report) printRequests(out io.Writer, slowest int) error {
	shown := r.Requests
	if slowest >= 0 {
		shown = r.Slowest(slowest)
		fmt.Fprintf(out, "\nthe slowest requests, us in each layer\n")
	} else {
		fmt.Fprintf(out, "\nall requests, us in each layer\n")
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "NUMBER\tOP\tDISK\tOFFSET\tBYTES\tFILE\tDEVICE\tALL us")
	for l := range layerCount {
		fmt.Fprintf(w, "\t%v", l)
	}
	fmt.Fprintln(w)
	for _, t := range shown {
		fmt.Fprintf(w, "%d\t%s\t%s\t%d\t%d\t%s\t%s\t%s", t.Number, t.Op, diskName(t.Disk), t.Offset, t.Bytes, event.Printable(t.file()), event.Printable(t.sector()), micros(t.Ns))
		for l := range layerCount {
			fmt.Fprintf(w, "\t%s", micros(t.Layers[l.String()]))
		}
		fmt.Fprintln(w)
	}
	return w.Flush()
}

func diskName(n int) string {
	if n < 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

// file returns the place of the request in a file: the place of `qemu-img map`, if the request went there.
func (t Request) file() string {
	ranges := t.Files
	if t.Offsets == same && len(t.Mapped) > 0 {
		ranges = t.Mapped
	}
	if len(ranges) == 0 {
		return "-"
	}
	return fmt.Sprintf("%s:%d%s", base(ranges[0].File), ranges[0].Offset, more(len(ranges)))
}

func base(path string) string { return path[strings.LastIndexByte(path, '/')+1:] }

func (t Request) sector() string {
	if len(t.Sectors) == 0 {
		return "-"
	}
	first := t.Sectors[0]
	for _, s := range t.Sectors {
		// Data first: the others belong to the image's tables.
		if len(t.Mapped) > 0 && s.File == t.Mapped[0].File && s.Offset <= t.Mapped[0].Offset && t.Mapped[0].Offset < s.Offset+s.Bytes {
			first = s
			first.Sector += (t.Mapped[0].Offset - s.Offset) / 512
			break
		}
	}
	return fmt.Sprintf("%s:%d%s", first.Disk, first.Sector, more(len(t.Sectors)))
}

func more(n int) string {
	if n < 2 {
		return ""
	}
	return fmt.Sprintf(" +%d", n-1)
}

type startLine struct {
	Type string `json:"type"` // start
	Head
	Ended  string            `json:"ended"`
	Events event.Summary     `json:"events"`
	NotRun map[string]uint64 `json:"not_run"`
	Files  []fileLine        `json:"files"`
	All    []string          `json:"all_notes"`
}

// fileLine is a file without its maps, which may be long.
type fileLine struct {
	Path   string   `json:"path"`
	Format string   `json:"format"`
	Chain  []string `json:"chain"`
	Direct bool     `json:"direct"`
}

type requestLine struct {
	Type string `json:"type"` // request
	Request
}

type summaryLine struct {
	Type string `json:"type"` // summary
	Sum
	Slow string `json:"slow"` // the layer with most of the time
}

// PrintJSON writes a report for programs: one object a line, with all requests by their beginning.
func (r *Report) PrintJSON(out io.Writer) error {
	e := json.NewEncoder(out)
	if err := e.Encode(r.Recording.startLine()); err != nil {
		return err
	}
	for _, t := range r.Requests {
		if err := e.Encode(requestLine{"request", t}); err != nil {
			return err
		}
	}
	return e.Encode(summaryLine{"summary", r.Sum, r.Sum.Slow()})
}

func (rec *Recording) startLine() startLine {
	start := startLine{Type: "start", Head: rec.Head, Files: []fileLine{}, NotRun: map[string]uint64{}, All: rec.notes()}
	if start.Sensors == nil {
		start.Sensors = []line.Sensor{}
	}
	if t := rec.Tail; t != nil {
		start.Ended, start.Events, start.NotRun = t.Ended, t.Events, t.NotRun
		for _, f := range t.Files {
			chain := f.Chain
			if chain == nil {
				chain = []string{}
			}
			start.Files = append(start.Files, fileLine{f.Path, f.Format, chain, f.Direct})
		}
	}
	return start
}
