package main

import "github.com/shunt-lb/shunt/bench/chart"

// inks are the colours of the manners, in turn.
var inks = []chart.Ink{chart.Vermilion, chart.Blue, chart.Green, chart.Purple}

// chart shows full tracking above, remembered flows on both panels, and a tenth of full tracking below.
func (r report) chart() chart.Chart {
	first := r.results[0]
	from, to := replacing(r.options)
	f := first.figures(from, to)
	constant := func(level float64) func(sample) float64 { return func(sample) float64 { return level } }
	upper := chart.Panel{Title: "Flows a direct-return service keeps, while its backends are replaced", Head: 0.4, Lines: []chart.Line{
		line("full tracking: by the same rules", first, func(s sample) float64 { return float64(s.tracked) }, chart.Grey),
		line("full tracking: flows alive", first, func(s sample) float64 { return float64(s.alive) }, chart.Dark),
	}}
	lower := chart.Panel{Title: "Remembered alone", Head: 0.35, Lines: []chart.Line{
		line("a tenth of full tracking by the same rules", first, constant(f.tracked/10), chart.Grey),
		line("a tenth of the flows alive", first, constant(f.alive/10), chart.Dark),
	}}
	lower.Lines[0].Dashed, lower.Lines[1].Dashed = true, true
	panels := []chart.Panel{upper, lower}
	for p := range panels {
		panels[p].X, panels[p].Y, panels[p].Legend = "hours", "entries", chart.TopRight
		for i, one := range r.results {
			remembered := func(s sample) float64 { return float64(s.remembered) }
			panels[p].Lines = append(panels[p].Lines, line("remembered: "+one.manner.name, one, remembered, inks[i%len(inks)]))
		}
	}
	return chart.Chart{Width: 9, Height: 8, Panels: panels}
}

func line(name string, of *result, value func(sample) float64, ink chart.Ink) chart.Line {
	l := chart.Line{Name: name, Ink: ink}
	for _, s := range of.samples {
		l.Points = append(l.Points, [2]float64{s.at.Hours(), value(s)})
	}
	return l
}
