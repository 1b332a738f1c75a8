package vdisk

import (
	"bufio"
	"fmt"
	"io"
)

// Sizes of a plot in pixels.
const (
	plotLeft, plotTop, plotWidth, plotRow, plotBar = 220, 60, 720, 26, 18
	plotTicks                                      = 6
	plotLegend                                     = 7 // names in a row
)

// plotColors are Paul Tol's "bright" scheme, which people of all colour vision tell apart.
var plotColors = [layerCount]string{"#4477aa", "#66ccee", "#228833", "#aa3377", "#ccbb44", "#ee6677", "#bbbbbb"}

// bar is a request in a plot.
type bar struct {
	name   string
	ns     uint64
	layers map[string]uint64
}

// Plot writes an SVG: slowest is the number of requests, the slowest first, each as a bar of its layers' times.
func (r *Report) Plot(to io.Writer, slowest int) error {
	var bars []bar
	for _, t := range r.Slowest(slowest) {
		bars = append(bars, bar{fmt.Sprintf("%d: %s %d at %d", t.Number, t.Op, t.Bytes, t.Offset), t.Ns, t.Layers})
	}
	return plotBars(to, hostLayers(), plotColors[:], bars)
}

func plotBars(to io.Writer, layers, colors []string, bars []bar) error {
	longest := uint64(1)
	for _, t := range bars {
		longest = max(longest, t.ns)
	}
	w := bufio.NewWriter(to)
	top := plotTop + (len(layers)-1)/plotLegend*20
	height := top + plotRow*len(bars) + 40
	fmt.Fprintf(w, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" font-size=\"12\">\n", plotLeft+plotWidth+90, height)
	fmt.Fprintln(w, `<rect width="100%" height="100%" fill="white"/>`)
	fmt.Fprintf(w, "<text x=\"10\" y=\"20\" font-size=\"14\">%d requests, time by layer</text>\n", len(bars))
	for l, name := range layers {
		x, y := plotLeft+l%plotLegend*100, 32+l/plotLegend*20
		fmt.Fprintf(w, "<rect x=\"%d\" y=\"%d\" width=\"12\" height=\"12\" fill=\"%s\"/><text x=\"%d\" y=\"%d\">%s</text>\n", x, y, colors[l], x+18, y+11, name)
	}
	scale := float64(plotWidth) / float64(longest)
	for i, t := range bars {
		y := top + i*plotRow
		fmt.Fprintf(w, "<text x=\"10\" y=\"%d\">%s</text>\n", y+14, t.name)
		at := float64(plotLeft)
		for l, name := range layers {
			width := float64(t.layers[name]) * scale
			if width > 0 {
				fmt.Fprintf(w, "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\"><title>%s: %s us</title></rect>\n", at, y, width, plotBar, colors[l], name, micros(t.layers[name]))
			}
			at += width
		}
		fmt.Fprintf(w, "<text x=\"%.2f\" y=\"%d\">%s us</text>\n", at+6, y+14, micros(t.ns))
	}
	for i := range plotTicks + 1 {
		x := plotLeft + plotWidth*i/plotTicks
		fmt.Fprintf(w, "<line x1=\"%d\" y1=\"%d\" x2=\"%d\" y2=\"%d\" stroke=\"#888\"/><text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s us</text>\n",
			x, height-36, x, height-30, x, height-14, micros(longest*uint64(i)/plotTicks))
	}
	fmt.Fprintln(w, "</svg>")
	return w.Flush()
}
