package vdisk

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/shunt-lb/shunt/internal/event"
)

// step is a place on a request's path, or its times.
type step struct{ at, where string }

// Chain writes the whole path of the slowest requests; slowest is their number, -1: all, by their beginning. A path has all places of a
// request, from its offset on the virtual disk to the sectors of the host's disk, and its time in each layer.
func (r *Report) Chain(out io.Writer, slowest int) error {
	shown := r.Requests
	if slowest >= 0 {
		shown = r.Slowest(slowest)
	}
	w := bufio.NewWriter(out)
	for _, t := range shown {
		writeChain(w, fmt.Sprintf("request %d: %s of %d bytes", t.Number, t.Op, t.Bytes), t.Ns, slices.Concat(t.steps(), timesOf(hostLayers(), t.Layers, t.Parts, r.Recording.Head.Probes)))
	}
	return w.Flush()
}

// Chain writes the whole path of the slowest joined requests; slowest is their number, -1: all, by their beginning: from the
// guest's file to the sectors of the host's disk.
func (b *Both) Chain(out io.Writer, slowest int) error {
	return chainInside(out, allLayers(), probeNames(b.Guest, b.Host.Recording), b.joined(), slowest)
}

// Chain writes the path of the slowest requests inside the guest; slowest is their number, -1: all, by their beginning.
func (g *Inside) Chain(out io.Writer, slowest int) error {
	return chainInside(out, insideLayers(), g.Guest.Head.Probes, g.Requests, slowest)
}

func chainInside(out io.Writer, layers, probes []string, requests []InsideRequest, slowest int) error {
	if slowest >= 0 {
		requests = slowestInside(requests, slowest)
	}
	w := bufio.NewWriter(out)
	for _, t := range requests {
		writeChain(w, fmt.Sprintf("request %d: %s of %d bytes by %s", t.Number, t.Op, t.Bytes, t.by()), t.Ns, slices.Concat(t.steps(), timesOf(layers, t.Layers, t.Parts, probes)))
	}
	return w.Flush()
}

// writeChain writes one path. The buffered writer keeps the error.
func writeChain(w io.Writer, head string, ns uint64, steps []step) {
	fmt.Fprintf(w, "%s, %s us\n", event.Printable(head), micros(ns))
	for _, s := range steps {
		fmt.Fprintf(w, "  %-13s %s\n", s.at, event.Printable(s.where))
	}
	fmt.Fprintln(w)
}

// String returns the range in words.
func (p FileRange) String() string {
	return fmt.Sprintf("%s at %d, %d bytes", p.File, p.Offset, p.Bytes)
}

// steps returns the places of a guest's request, and then those of the host's request below it.
func (t InsideRequest) steps() (steps []step) {
	for _, p := range t.Files {
		steps = append(steps, step{"guest's file", fmt.Sprintf("%v; its extents: %s", p, t.Extents)})
	}
	steps = append(steps, step{"guest's disk", fmt.Sprintf("%s at %d, sector %d", t.Disk, t.Offset, t.Offset/512)})
	if t.Missing != "" {
		steps = append(steps, step{"not followed", t.Missing})
	}
	if t.Host == nil {
		return steps
	}
	return append(steps, t.Host.steps()...)
}

// steps returns the places of a host's request.
func (t Request) steps() (steps []step) {
	if t.Disk >= 0 {
		steps = append(steps, step{"virtual disk", fmt.Sprintf("%d at %d", t.Disk, t.Offset)})
	}
	for _, p := range t.Mapped {
		steps = append(steps, step{"qemu-img map", p.String()})
	}
	for _, p := range t.Files {
		steps = append(steps, step{"qemu's IO", fmt.Sprintf("%v; qemu-img map: %s", p, t.Offsets)})
	}
	for _, s := range t.Sectors {
		text := fmt.Sprintf("%s at sector %d, %d bytes", s.Disk, s.Sector, s.Bytes)
		if s.File != "" {
			text += fmt.Sprintf(", of %s at %d; its extents: %s", base(s.File), s.Offset, t.Extents)
		}
		if s.Held {
			text += "; a cgroup's limit held it back"
		}
		steps = append(steps, step{"disk", text})
	}
	if t.Missing != "" {
		steps = append(steps, step{"not followed", t.Missing})
	} else if t.Ends != endsInDevice {
		steps = append(steps, step{"its path ends", "in " + t.Ends})
	}
	return steps
}

// timesOf returns the times of all layers in which the request was, and of their parts between probes.
func timesOf(layers []string, times map[string]uint64, parts Parts, probes []string) []step {
	var all []string
	for _, name := range layers {
		if times[name] > 0 {
			all = append(all, name+" "+micros(times[name]))
		}
	}
	if len(all) == 0 {
		return []step{{"us by layer", "not known"}}
	}
	steps := []step{{"us by layer", strings.Join(all, ", ")}}
	if text := parts.line(layers, probes); text != "" {
		steps = append(steps, step{"us by part", text})
	}
	return steps
}
