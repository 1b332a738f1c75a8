package vdisk

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/shunt-lb/shunt/internal/event"
)

// pass is the time at which a request was at a probe.
type pass struct {
	at    uint64
	probe uint64 // its number in the recording
}

// stretch is a time in one layer.
type stretch struct {
	from, to uint64
	in       string
}

// Parts are times in ns of a request, by layer and by the last probe passed; "": until the first probe. The parts
// of a layer add up to the layer's time. Layers without a probe have none.
type Parts map[string]map[string]uint64

// Part is a part of a layer over all requests that passed a probe there.
type Part struct {
	Layer    string `json:"layer"`
	From     string `json:"from"` // the probe; "": until the first one
	Requests uint64 `json:"requests"`
	Spread          // its share is relative to the layer, in the requests that passed a probe there
}

// Passes counts the passes of a probe, and the passes that belong to no known request.
type Passes struct {
	Probe string `json:"probe"`
	Count uint64 `json:"passes"`
	Stray uint64 `json:"of_no_request"`
}

// divide divides the layers in which a request was at a probe. Stretches follow each other.
func divide(stretches []stretch, passes []pass, names []string) Parts {
	parts, last := Parts{}, map[string]string{}
	add := func(in string, ns uint64) {
		if parts[in] == nil {
			parts[in] = map[string]uint64{}
		}
		parts[in][last[in]] += ns
	}
	for _, s := range stretches {
		at := s.from
		for _, p := range passes {
			if p.at < s.from || p.at >= s.to || p.probe >= uint64(len(names)) {
				continue
			}
			add(s.in, p.at-at)
			at, last[s.in] = p.at, names[p.probe]
		}
		add(s.in, s.to-at)
	}
	for in := range parts {
		if last[in] == "" {
			delete(parts, in)
		}
	}
	return parts
}

// sumParts returns the parts of all requests, in the order of the layers and of the probes.
func sumParts(layers, probes []string, all []Parts) (sum []Part) {
	for _, layer := range layers {
		whole := uint64(0)
		times := map[string][]uint64{}
		for _, parts := range all {
			for from, ns := range parts[layer] {
				whole += ns
				times[from] = append(times[from], ns)
			}
		}
		for _, from := range append([]string{""}, probes...) {
			if n := len(times[from]); n > 0 {
				sum = append(sum, Part{layer, from, uint64(n), spread(times[from], whole)})
			}
		}
	}
	return sum
}

// countPasses counts the passes of a recording's probes; of has the passes of its requests.
func countPasses(rec *Recording, of map[uint64]uint64) (all []Passes) {
	if len(rec.Head.Probes) == 0 {
		return nil
	}
	counts := make([]uint64, len(rec.Head.Probes))
	for i := range rec.Events {
		e := &rec.Events[i]
		if vdiskVdiskKind(e.Kind) == vdiskVdiskKindVDISK_POINT && e.Id < uint64(len(counts)) {
			counts[e.Id]++
		}
	}
	for i, count := range counts {
		all = append(all, Passes{rec.Head.Probes[i], count, count - min(count, of[uint64(i)])})
	}
	return all
}

// printParts writes the parts of layers, if there are probes.
func printParts(out io.Writer, parts []Part, passes []Passes) error {
	if len(passes) == 0 {
		return nil
	}
	fmt.Fprintln(out)
	for _, p := range passes {
		text := fmt.Sprintf("%s: passed %d times", event.Printable(p.Probe), p.Count)
		if p.Stray > 0 {
			text += fmt.Sprintf(", %d of them for no request that is known", p.Stray)
		}
		fmt.Fprintln(out, text)
	}
	if len(parts) == 0 {
		return nil
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "LAYER\tPART\tREQUESTS\tSHARE\tMEAN us\tP50\tP90\tP99\tMAX")
	for _, p := range parts {
		from := "from " + p.From + " on"
		if p.From == "" {
			from = "until the first probe"
		}
		fmt.Fprintf(w, "%s\t%s\t%d\t%.1f %%\t%s\t%s\t%s\t%s\t%s\n", p.Layer, event.Printable(from), p.Requests, p.Share, micros(p.Mean), micros(p.P50), micros(p.P90), micros(p.P99), micros(p.Max))
	}
	return w.Flush()
}

// probeNames returns the names of both recordings' probes.
func probeNames(recs ...*Recording) (names []string) {
	for _, rec := range recs {
		for _, name := range rec.Head.Probes {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}

// line returns the parts of one request as text, in the order of the layers and probes; "": there are none.
func (p Parts) line(layers, probes []string) string {
	var all []string
	for _, layer := range layers {
		for _, from := range append([]string{""}, probes...) {
			if ns, is := p[layer][from]; is {
				name := "until the first probe"
				if from != "" {
					name = "from " + from + " on"
				}
				all = append(all, fmt.Sprintf("%s %s %s", layer, name, micros(ns)))
			}
		}
	}
	return strings.Join(all, ", ")
}
