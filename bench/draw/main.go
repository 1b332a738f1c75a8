// Draw makes pictures of charts (bench/chart), each as PNG and as SVG beside its data.
//
//	go run -C bench/draw . FILE.chart.json …
//
// It is a module of its own, because of the libraries that it brings.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"image/color"
	"io"
	"os"
	"strings"

	"github.com/shunt-lb/shunt/bench/chart"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/plotutil"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintf(os.Stderr, "draw: no chart is named. Usage: go run -C bench/draw . FILE%s …\n", chart.Suffix)
		os.Exit(2)
	}
	for _, file := range os.Args[1:] {
		if err := picture(file); err != nil {
			fmt.Fprintf(os.Stderr, "draw %s: %v\n", file, err)
			os.Exit(1)
		}
	}
}

// picture draws the chart in a file, as PNG and as SVG beside it.
func picture(file string) error {
	name, ok := strings.CutSuffix(file, chart.Suffix)
	if !ok {
		return fmt.Errorf("the name of a chart ends in %s", chart.Suffix)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	var c chart.Chart
	if err := json.Unmarshal(text, &c); err != nil {
		return err
	}
	if len(c.Panels) == 0 || c.Width <= 0 || c.Height <= 0 {
		return errors.New("a chart has a width, a height and at least one panel")
	}
	width, height := vg.Length(c.Width)*vg.Inch, vg.Length(c.Height)*vg.Inch
	svg, raster := vgsvg.New(width, height), vgimg.New(width, height)
	for suffix, canvas := range map[string]struct {
		vg.CanvasSizer
		io.WriterTo
	}{".svg": {svg, svg}, ".png": {raster, vgimg.PngCanvas{Canvas: raster}}} {
		if err := paint(c, draw.New(canvas.CanvasSizer)); err != nil {
			return err
		}
		if err := write(name+suffix, canvas); err != nil {
			return err
		}
	}
	return nil
}

func write(path string, from io.WriterTo) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = from.WriteTo(f)
	return errors.Join(err, f.Close())
}

func paint(c chart.Chart, on draw.Canvas) error {
	var column [][]*plot.Plot
	for _, p := range c.Panels {
		one, err := panel(p)
		if err != nil {
			return fmt.Errorf("panel %q: %w", p.Title, err)
		}
		column = append(column, []*plot.Plot{one})
	}
	tiles := draw.Tiles{Rows: len(column), Cols: 1, PadX: vg.Points(12), PadY: vg.Points(12), PadTop: vg.Points(8), PadLeft: vg.Points(8), PadRight: vg.Points(16)}
	for i, row := range plot.Align(column, tiles, on) {
		column[i][0].Draw(row[0])
	}
	return nil
}

func panel(from chart.Panel) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = from.Title, from.X, from.Y
	p.Legend.Top, p.Legend.Left, p.Legend.Padding = true, from.Legend == chart.TopLeft, vg.Points(2)
	if from.LogY {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	} else {
		p.Y.Min = 0
	}
	p.Add(plotter.NewGrid())
	for n, l := range from.Lines {
		if err := line(p, l, n); err != nil {
			return nil, fmt.Errorf("line %q: %w", l.Name, err)
		}
	}
	p.Y.Max *= 1 + from.Head
	return p, nil
}

// line adds a line; n is its number in the panel.
func line(p *plot.Plot, from chart.Line, n int) error {
	if len(from.Points) == 0 {
		return errors.New("it has no points")
	}
	var points plotter.XYs
	for _, point := range from.Points {
		if _, log := p.Y.Scale.(plot.LogScale); log && point[1] <= 0 {
			return fmt.Errorf("the value %g at %g has no place on a logarithmic axis", point[1], point[0])
		}
		points = append(points, plotter.XY{X: point[0], Y: point[1]})
	}
	l, dots, err := plotter.NewLinePoints(points)
	if err != nil {
		return err
	}
	var ink color.RGBA
	if _, err := fmt.Sscanf(string(from.Ink), "#%02x%02x%02x", &ink.R, &ink.G, &ink.B); err != nil {
		return fmt.Errorf("colour %q: must be #rrggbb", from.Ink)
	}
	ink.A = 0xff
	l.Color, dots.Color, l.Width = ink, ink, vg.Points(1.5)
	if from.Dashed {
		l.Dashes = []vg.Length{vg.Points(5), vg.Points(3)}
	}
	shown := []plot.Thumbnailer{l}
	p.Add(l)
	if from.Dots {
		dots.Shape = plotutil.Shape(n)
		p.Add(dots)
		shown = append(shown, dots)
	}
	p.Legend.Add(from.Name, shown...)
	return nil
}
