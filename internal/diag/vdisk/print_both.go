package vdisk

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"text/tabwriter"

	"github.com/shunt-lb/shunt/internal/event"
)

// Inside is a guest's recording alone, joined.
type Inside struct {
	Guest    *Recording
	Requests []InsideRequest
	Sum      InsideSum
}

// InsideSum has the numbers of a guest's recording.
type InsideSum struct {
	Requests uint64            `json:"requests"`
	Ops      map[string]uint64 `json:"ops"`
	Missing  map[string]uint64 `json:"missing"`
	Extents  map[string]uint64 `json:"guest_extents"`
	Total    Spread            `json:"total"`
	Layers   map[string]Spread `json:"layers"`
	Parts    []Part            `json:"parts,omitempty"`
	Passes   []Passes          `json:"passes,omitempty"`
}

// OfGuest joins a guest's recording.
func OfGuest(rec *Recording) *Inside {
	all, requests := insideRequests(rec)
	g := &Inside{Guest: rec, Requests: requests}
	s := &g.Sum
	s.Ops, s.Missing, s.Extents = map[string]uint64{}, map[string]uint64{}, map[string]uint64{}
	var ended []InsideRequest
	for _, t := range requests {
		s.Requests++
		s.Ops[t.Op]++
		if len(t.Files) > 0 {
			s.Extents[t.Extents]++
		}
		if t.Missing != "" {
			s.Missing[t.Missing]++
		} else {
			ended = append(ended, t)
		}
	}
	s.Total, s.Layers = sumLayers(insideLayers(), ended)
	s.Parts, s.Passes = sumParts(insideLayers(), rec.Head.Probes, partsOf(ended)), countPasses(rec, passesOf(all))
	return g
}

// Print writes a report for people, with the slowest requests; slowest is their number, -1: all, by their issue.
func (g *Inside) Print(out io.Writer, slowest int) error {
	g.Guest.printHead(out)
	s := g.Sum
	fmt.Fprintf(out, "\n%d requests to drivers%s\n", s.Requests, counts(s.Ops, ": "))
	for _, why := range slices.Sorted(maps.Keys(s.Missing)) {
		fmt.Fprintf(out, "%d not followed: %s\n", s.Missing[why], why)
	}
	fmt.Fprintf(out, "sectors of the guest's disks, against its files' extents%s\n", counts(s.Extents, ": "))
	if s.Total.Max == 0 {
		return nil
	}
	if err := printLayers(out, insideLayers(), s.Layers, s.Total); err != nil {
		return err
	}
	if err := printParts(out, s.Parts, s.Passes); err != nil {
		return err
	}
	return printInside(out, insideLayers(), g.Requests, slowest)
}

// PrintJSON writes a report for programs: one object a line, with all requests by their issue.
func (g *Inside) PrintJSON(out io.Writer) error {
	e := json.NewEncoder(out)
	if err := e.Encode(g.Guest.startLine()); err != nil {
		return err
	}
	if err := encodeInside(e, g.Requests); err != nil {
		return err
	}
	return e.Encode(struct {
		Type string `json:"type"` // summary
		InsideSum
		Slow string `json:"slow"`
	}{"summary", g.Sum, slow(g.Sum.Layers)})
}

type insideLine struct {
	Type string `json:"type"` // guest_request
	InsideRequest
}

func encodeInside(e *json.Encoder, requests []InsideRequest) error {
	for _, t := range requests {
		if err := e.Encode(insideLine{"guest_request", t}); err != nil {
			return err
		}
	}
	return nil
}

// Print writes a report for people, with the slowest requests; slowest is their number, -1: all, by their issue.
func (b *Both) Print(out io.Writer, slowest int) error {
	b.Host.Recording.printHead(out)
	fmt.Fprintln(out)
	b.Guest.printHead(out)
	s := b.Sum
	fmt.Fprintf(out, "\nthe host's clock is ahead of the guest's by %.1f us, +- %.1f us, by %d requests", b.Clock.Offset/1000, b.Clock.Error/1000, b.Clock.From)
	if b.Clock.Drift != 0 {
		fmt.Fprintf(out, "; it is faster by %.2f us a second", b.Clock.Drift*1e6)
	}
	fmt.Fprintf(out, "\nso %s may have up to %.1f us of %s, and the other way round; both together are exact\n", insideDown, b.Clock.Error/1000, insideUp)
	for _, name := range slices.Sorted(maps.Keys(b.Disks)) {
		fmt.Fprintf(out, "the guest's disk %s is disk %d of the host's recording\n", event.Printable(name), b.Disks[name])
	}
	fmt.Fprintf(out, "\n%d requests of the guest; joined with the host's: %d (%s)\n", s.Requests, s.Joined, percent(s.Joined, s.Requests))
	for _, why := range slices.Sorted(maps.Keys(s.Missing)) {
		fmt.Fprintf(out, "%d of the guest not joined: %s\n", s.Missing[why], why)
	}
	for _, why := range slices.Sorted(maps.Keys(s.Alone)) {
		fmt.Fprintf(out, "%d of the host not joined: %s\n", s.Alone[why], why)
	}
	fmt.Fprintf(out, "sectors of the guest's disks, against its files' extents%s\n", counts(s.Extents, ": "))
	fmt.Fprintf(out, "offsets in the host's files, against qemu-img map%s\n", counts(b.Host.Sum.Offsets, ": "))
	fmt.Fprintf(out, "sectors of the host's disks, against its files' extents%s\n", counts(b.Host.Sum.Extents, ": "))
	if s.Total.Max == 0 {
		return nil
	}
	if err := printLayers(out, allLayers(), s.Layers, s.Total); err != nil {
		return err
	}
	if err := printParts(out, s.Parts, append(slices.Clone(s.Passes), b.Host.Sum.Passes...)); err != nil {
		return err
	}
	return printInside(out, allLayers(), b.joined(), slowest)
}

// PrintJSON writes a report for programs: one object a line: the beginnings of both recordings, the guest's requests by their
// issue, each with the host's, and the summary.
func (b *Both) PrintJSON(out io.Writer) error {
	e := json.NewEncoder(out)
	for _, rec := range []*Recording{b.Host.Recording, b.Guest} {
		if err := e.Encode(rec.startLine()); err != nil {
			return err
		}
	}
	if err := encodeInside(e, b.Requests); err != nil {
		return err
	}
	return e.Encode(struct {
		Type string `json:"type"` // summary
		BothSum
		Clock Clock          `json:"clock"`
		Disks map[string]int `json:"disks"`
		Slow  string         `json:"slow"`
		Host  Sum            `json:"host"`
	}{"summary", b.Sum, b.Clock, b.Disks, slow(b.Sum.Layers), b.Host.Sum})
}

func (b *Both) joined() []InsideRequest {
	return slices.DeleteFunc(slices.Clone(b.Requests), func(t InsideRequest) bool { return t.Host == nil })
}

// slowestInside returns the n requests that took longest, of those with an end.
func slowestInside(requests []InsideRequest, n int) []InsideRequest {
	all := slices.DeleteFunc(slices.Clone(requests), func(t InsideRequest) bool { return t.Ns == 0 })
	slices.SortStableFunc(all, func(a, b InsideRequest) int { return cmp.Compare(b.Ns, a.Ns) })
	return all[:min(n, len(all))]
}

func printInside(out io.Writer, layers []string, requests []InsideRequest, slowest int) error {
	if slowest >= 0 {
		requests = slowestInside(requests, slowest)
		fmt.Fprintf(out, "\nthe slowest requests, us in each layer\n")
	} else {
		fmt.Fprintf(out, "\nall requests, us in each layer\n")
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "NUMBER\tOP\tBY\tGUEST'S FILE\tGUEST'S DISK\tBYTES\tFILE\tDEVICE\tALL us")
	for _, name := range layers {
		fmt.Fprintf(w, "\t%s", name)
	}
	fmt.Fprintln(w)
	for _, t := range requests {
		file, sector := "-", "-"
		if t.Host != nil {
			file, sector = t.Host.file(), t.Host.sector()
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s:%d\t%d\t%s\t%s\t%s", t.Number, t.Op, event.Printable(t.by()), event.Printable(t.inFile()), event.Printable(t.Disk), t.Offset, t.Bytes,
			event.Printable(file), event.Printable(sector), micros(t.Ns))
		for _, name := range layers {
			fmt.Fprintf(w, "\t%s", micros(t.Layers[name]))
		}
		fmt.Fprintln(w)
	}
	return w.Flush()
}

// by returns the task that asked for the request.
func (t InsideRequest) by() string {
	if t.Comm == "" {
		return "-"
	}
	return t.Comm
}

// inFile returns the first place in the guest's files.
func (t InsideRequest) inFile() string {
	if len(t.Files) == 0 {
		return "-"
	}
	return fmt.Sprintf("%s:%d%s", base(t.Files[0].File), t.Files[0].Offset, more(len(t.Files)))
}

// insideColors returns the colours of the layers of both halves: dark ones for the guest, and those of the host's plot for qemu and the host.
func insideColors() []string {
	return append(append([]string{"#332288", "#999933", "#117733", "#882255"}, plotColors[:]...), "#dd99cc", "#555555")
}

// Plot writes an SVG: slowest is the number of requests, the slowest first, each as a bar of its layers' times.
func (b *Both) Plot(to io.Writer, slowest int) error {
	return plotBars(to, allLayers(), insideColors(), insideBars(b.joined(), slowest))
}

// Plot writes an SVG: slowest is the number of requests, the slowest first, each as a bar of its layers' times.
func (g *Inside) Plot(to io.Writer, slowest int) error {
	return plotBars(to, insideLayers(), []string{"#332288", "#999933", "#117733", "#bbbbbb", "#555555"}, insideBars(g.Requests, slowest))
}

func insideBars(requests []InsideRequest, slowest int) (bars []bar) {
	for _, t := range slowestInside(requests, slowest) {
		bars = append(bars, bar{fmt.Sprintf("%d: %s %d at %d", t.Number, t.Op, t.Bytes, t.Offset), t.Ns, t.Layers})
	}
	return bars
}
