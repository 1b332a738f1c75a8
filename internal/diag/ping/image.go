package ping

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"
	"time"
)

const (
	imageColumns = 720 // of the timeline: it has at least half as many points when there are more probes
	imageSlowest = 12  // probes whose stages are drawn

	imageLeft, imageTop, imageHeight = 130, 50, 220 // px, of the timeline
	imageRow, imageBar               = 26, 18
	imageTicks                       = 6
	imageLegend                      = 6 // stages in a row
)

// Image collects the data of a run's image: round trips over time, and the stages of the slowest probes. Its memory is limited, however long
// the run is.
type Image struct {
	begin   time.Time
	points  []imagePoint
	every   uint64 // number of probes in a point
	slowest []Probe
	longest int64
}

// imagePoint is a sequence of probes.
type imagePoint struct {
	from, to    time.Duration // since the first probe
	least, most int64         // round trips, ns
	answered    uint64
	lost        uint64
}

// Add takes a probe, in the order in which they are settled.
func (i *Image) Add(p Probe) {
	if i.every == 0 {
		i.begin, i.every = p.Time, 1
	}
	at := max(0, p.Time.Sub(i.begin))
	one := imagePoint{from: at, to: at, least: p.RoundTrip, most: p.RoundTrip, answered: 1}
	if p.Lost {
		one = imagePoint{from: at, to: at, lost: 1}
	} else {
		i.longest = max(i.longest, p.RoundTrip)
		i.keep(p)
	}
	if last := len(i.points) - 1; last >= 0 && i.points[last].answered+i.points[last].lost < i.every {
		i.points[last] = i.points[last].with(one)
		return
	}
	if len(i.points) == imageColumns {
		for n := range imageColumns / 2 {
			i.points[n] = i.points[2*n].with(i.points[2*n+1])
		}
		i.points = i.points[:imageColumns/2]
		i.every *= 2
	}
	i.points = append(i.points, one)
}

// with returns both points as one.
func (a imagePoint) with(b imagePoint) imagePoint {
	a.from, a.to = min(a.from, b.from), max(a.to, b.to)
	switch {
	case a.answered == 0:
		a.least, a.most = b.least, b.most
	case b.answered > 0:
		a.least, a.most = min(a.least, b.least), max(a.most, b.most)
	}
	a.answered, a.lost = a.answered+b.answered, a.lost+b.lost
	return a
}

// keep keeps the slowest probes, the slowest first.
func (i *Image) keep(p Probe) {
	at, _ := slices.BinarySearchFunc(i.slowest, p, func(a, b Probe) int { return cmp.Compare(b.RoundTrip, a.RoundTrip) })
	if at == imageSlowest {
		return
	}
	i.slowest = slices.Insert(i.slowest, at, p.clone())
	i.slowest = i.slowest[:min(len(i.slowest), imageSlowest)]
}

// Write draws an SVG of the width 1000 px.
func (i *Image) Write(to io.Writer) error {
	w := bufio.NewWriter(to)
	legend := i.legend()
	bars := imageTop + imageHeight + 110 + 18*max(0, (len(legend)-1)/imageLegend-1)
	height := bars + imageRow*len(i.slowest) + 40
	fmt.Fprintf(w, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1000\" height=\"%d\" font-family=\"sans-serif\" font-size=\"12\">\n", height)
	fmt.Fprintln(w, `<rect width="100%" height="100%" fill="white"/>`)
	if len(i.points) == 0 {
		fmt.Fprintf(w, "<text x=\"10\" y=\"20\" font-size=\"14\">no probe has been sent</text>\n</svg>\n")
		return w.Flush()
	}
	i.timeline(w)
	i.stages(w, bars, legend)
	fmt.Fprintln(w, "</svg>")
	return w.Flush()
}

// timeline draws the round trips from the smallest to the largest of each point, and the lost probes.
func (i *Image) timeline(w io.Writer) {
	var answered, lost uint64
	took := time.Microsecond
	for _, p := range i.points { // a lost probe is settled after later ones
		answered, lost, took = answered+p.answered, lost+p.lost, max(took, p.to)
	}
	fmt.Fprintf(w, "<text x=\"10\" y=\"20\" font-size=\"14\">Round trips from %s on: %d probes answered, %d lost</text>\n", i.begin.Format(time.DateTime), answered, lost)
	x := func(d time.Duration) float64 {
		return imageLeft + float64(imageColumns)*float64(d)/float64(took)
	}
	bottom := imageTop + imageHeight
	y := func(ns int64) float64 { return float64(bottom) - imageHeight*float64(ns)/float64(max(1, i.longest)) }
	fmt.Fprintf(w, "<path d=\"M%d %dV%dH%d\" stroke=\"#888\" fill=\"none\"/>\n", imageLeft, imageTop, bottom, imageLeft+imageColumns)
	for n := range imageTicks + 1 {
		part := func(all int64) int64 { return all * int64(n) / imageTicks }
		fmt.Fprintf(w, "<text x=\"%d\" y=\"%.2f\" text-anchor=\"end\">%s µs</text>\n", imageLeft-6, y(part(i.longest))+4, us(part(i.longest)))
		at := time.Duration(part(int64(took)))
		fmt.Fprintf(w, "<text x=\"%.2f\" y=\"%d\" text-anchor=\"middle\">%.3f s</text>\n", x(at), bottom+34, at.Seconds())
	}
	for _, p := range i.points {
		middle := x((p.from + p.to) / 2)
		if p.answered > 0 {
			fmt.Fprintf(w, "<path d=\"M%.2f %.2fV%.2f\" stroke=\"#4477aa\" stroke-width=\"2\" stroke-linecap=\"round\"/>\n", middle, y(p.most), y(p.least))
		}
		if p.lost > 0 {
			fmt.Fprintf(w, "<path d=\"M%.2f %dv12\" stroke=\"#ee6677\" stroke-width=\"2\"><title>%d lost</title></path>\n", middle, bottom+4, p.lost)
		}
	}
}

// legend returns the stages that are named beside their colours: those of ICMP, and all others that are drawn.
func (i *Image) legend() (all []stageKind) {
	drawn := map[int]bool{}
	for _, p := range i.slowest {
		for _, s := range p.Stages {
			drawn[stageAt(s.Name)] = true
		}
	}
	for at, k := range stages {
		if k.isPlain || drawn[at] {
			all = append(all, k)
		}
	}
	return all
}

// stages draws the slowest probes as bars of their stages.
func (i *Image) stages(w io.Writer, top int, legend []stageKind) {
	above := top - 42 - 18*max(0, (len(legend)-1)/imageLegend-1)
	fmt.Fprintf(w, "<text x=\"10\" y=\"%d\" font-size=\"14\">The slowest probes, by stage</text>\n", above-10)
	for n, k := range legend {
		at, down := 10+n%imageLegend*160, above+n/imageLegend*18
		fmt.Fprintf(w, "<rect x=\"%d\" y=\"%d\" width=\"12\" height=\"12\" fill=\"%s\"/><text x=\"%d\" y=\"%d\">%s</text>\n", at, down, k.color, at+18, down+11, k.name)
	}
	scale := float64(imageColumns) / float64(max(1, i.longest))
	for n, p := range i.slowest {
		y, at := top+n*imageRow, float64(imageLeft)
		fmt.Fprintf(w, "<text x=\"10\" y=\"%d\">%d, %.3f s</text>\n", y+14, p.Sequence, p.Time.Sub(i.begin).Seconds())
		for _, s := range p.Stages {
			width := float64(max(0, s.Ns)) * scale
			fmt.Fprintf(w, "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\"><title>%s: %s µs</title></rect>\n",
				at, y, width, imageBar, stages[stageAt(s.Name)].color, s.Name, us(s.Ns))
			at += width
		}
		fmt.Fprintf(w, "<text x=\"%.2f\" y=\"%d\">%s µs</text>\n", at+6, y+14, us(p.RoundTrip))
	}
}
