package main

import (
	"image/color"
	"io"
	"os"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"
)

// Colours that stay apart for the colour-blind (Okabe and Ito, "Color Universal Design").
var (
	grey = color.RGBA{0x99, 0x99, 0x99, 0xff}
	dark = color.RGBA{0x44, 0x44, 0x44, 0xff}
	inks = []color.Color{color.RGBA{0xd5, 0x5e, 0x00, 0xff}, color.RGBA{0x00, 0x72, 0xb2, 0xff}}
)

const (
	plotWidth  = 9 * vg.Inch
	plotHeight = 8 * vg.Inch
)

// draw writes the plot as <path>.png and <path>.svg.
func (r report) draw(path string) error {
	upper, lower := plot.New(), plot.New()
	upper.Title.Text = "Flows a direct-return service keeps, while its backends are replaced"
	lower.Title.Text = "Remembered alone"
	for _, p := range []*plot.Plot{upper, lower} {
		p.X.Label.Text, p.Y.Label.Text = "hours", "entries"
		p.Y.Min = 0
		p.Legend.Top, p.Legend.Padding = true, vg.Points(2)
		p.Add(plotter.NewGrid())
	}
	if err := r.addLines(upper, lower); err != nil {
		return err
	}
	// Room for the legends.
	upper.Y.Max *= 1.4
	lower.Y.Max *= 1.35
	svg := vgsvg.New(plotWidth, plotHeight)
	raster := vgimg.New(plotWidth, plotHeight)
	for suffix, canvas := range map[string]struct {
		vg.CanvasSizer
		io.WriterTo
	}{".svg": {svg, svg}, ".png": {raster, vgimg.PngCanvas{Canvas: raster}}} {
		tiles := draw.Tiles{Rows: 2, Cols: 1, PadX: vg.Points(12), PadY: vg.Points(12), PadTop: vg.Points(8), PadLeft: vg.Points(8), PadRight: vg.Points(16)}
		panels := plot.Align([][]*plot.Plot{{upper}, {lower}}, tiles, draw.New(canvas.CanvasSizer))
		upper.Draw(panels[0][0])
		lower.Draw(panels[1][0])
		if err := writeFile(path+suffix, canvas); err != nil {
			return err
		}
	}
	return nil
}

func writeFile(path string, from io.WriterTo) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	if _, err := from.WriteTo(f); err != nil {
		_ = f.Close()
		return err
	}
	return f.Close()
}

// addLines draws full tracking above, what is remembered on both, and a tenth below.
func (r report) addLines(upper, lower *plot.Plot) error {
	first := r.results[0]
	from, to := replacing(r.options)
	f := first.figures(from, to)
	constant := func(level float64) func(sample) float64 { return func(sample) float64 { return level } }
	for _, one := range []struct {
		on     *plot.Plot
		name   string
		of     *result
		value  func(sample) float64
		ink    color.Color
		dashed bool
	}{
		{upper, "full tracking: by the same rules", first, func(s sample) float64 { return float64(s.tracked) }, grey, false},
		{upper, "full tracking: flows alive", first, func(s sample) float64 { return float64(s.alive) }, dark, false},
		{lower, "a tenth of full tracking by the same rules", first, constant(f.tracked / 10), grey, true},
		{lower, "a tenth of the flows alive", first, constant(f.alive / 10), dark, true},
	} {
		if err := addLine(one.on, one.name, one.of, one.value, one.ink, one.dashed); err != nil {
			return err
		}
	}
	for i, one := range r.results {
		for _, p := range []*plot.Plot{upper, lower} {
			name := "remembered: " + one.manner.name
			if err := addLine(p, name, one, func(s sample) float64 { return float64(s.remembered) }, inks[i%len(inks)], false); err != nil {
				return err
			}
		}
	}
	return nil
}

func addLine(p *plot.Plot, name string, of *result, value func(sample) float64, ink color.Color, dashed bool) error {
	points := make(plotter.XYs, len(of.samples))
	for i, s := range of.samples {
		points[i].X, points[i].Y = s.at.Hours(), value(s)
	}
	line, err := plotter.NewLine(points)
	if err != nil {
		return err
	}
	line.Color, line.Width = ink, vg.Points(1.2)
	if dashed {
		line.Dashes = []vg.Length{vg.Points(5), vg.Points(3)}
	}
	p.Add(line)
	p.Legend.Add(name, line)
	return nil
}
