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
)

// plotColors are those of Paul Tol's "bright" scheme, which people of all colour vision tell apart.
var plotColors = [layerCount]string{"#4477aa", "#66ccee", "#228833", "#aa3377", "#ccbb44", "#ee6677", "#bbbbbb"}

// Plot writes an SVG: the slowest requests, so many, the slowest first, each as a bar of its layers' times.
func (r *Report) Plot(to io.Writer, slowest int) error {
	shown := r.Slowest(slowest)
	longest := uint64(1)
	for _, t := range shown {
		longest = max(longest, t.Ns)
	}
	w := bufio.NewWriter(to)
	height := plotTop + plotRow*len(shown) + 40
	fmt.Fprintf(w, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" font-size=\"12\">\n", plotLeft+plotWidth+90, height)
	fmt.Fprintln(w, `<rect width="100%" height="100%" fill="white"/>`)
	fmt.Fprintf(w, "<text x=\"10\" y=\"20\" font-size=\"14\">%d requests, time by layer</text>\n", len(shown))
	for l := range layerCount {
		x := plotLeft + int(l)*100
		fmt.Fprintf(w, "<rect x=\"%d\" y=\"32\" width=\"12\" height=\"12\" fill=\"%s\"/><text x=\"%d\" y=\"43\">%v</text>\n", x, plotColors[l], x+18, l)
	}
	scale := float64(plotWidth) / float64(longest)
	for i, t := range shown {
		y := plotTop + i*plotRow
		fmt.Fprintf(w, "<text x=\"10\" y=\"%d\">%d: %s %d at %d</text>\n", y+14, t.Number, t.Op, t.Bytes, t.Offset)
		at := float64(plotLeft)
		for l := range layerCount {
			width := float64(t.Layers[l.String()]) * scale
			if width > 0 {
				fmt.Fprintf(w, "<rect x=\"%.2f\" y=\"%d\" width=\"%.2f\" height=\"%d\" fill=\"%s\"><title>%v: %s us</title></rect>\n", at, y, width, plotBar, plotColors[l], l, micros(t.Layers[l.String()]))
			}
			at += width
		}
		fmt.Fprintf(w, "<text x=\"%.2f\" y=\"%d\">%s us</text>\n", at+6, y+14, micros(t.Ns))
	}
	for i := range plotTicks + 1 {
		x := plotLeft + plotWidth*i/plotTicks
		fmt.Fprintf(w, "<line x1=\"%d\" y1=\"%d\" x2=\"%d\" y2=\"%d\" stroke=\"#888\"/><text x=\"%d\" y=\"%d\" text-anchor=\"middle\">%s us</text>\n",
			x, height-36, x, height-30, x, height-14, micros(longest*uint64(i)/plotTicks))
	}
	fmt.Fprintln(w, "</svg>")
	return w.Flush()
}
