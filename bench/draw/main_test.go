package main

import (
	"bytes"
	"encoding/json"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/bench/chart"
)

func drawn(t *testing.T, c chart.Chart) (svg string, err error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "delay")
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path+chart.Suffix, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := picture(path + chart.Suffix); err != nil {
		return "", err
	}
	raster, err := os.ReadFile(path + ".png")
	if err != nil {
		t.Fatal(err)
	}
	if size, err := png.DecodeConfig(bytes.NewReader(raster)); err != nil || size.Width < 100 || size.Height < 100 {
		t.Errorf("the PNG has %d × %d pixels: %v", size.Width, size.Height, err)
	}
	is, err := os.ReadFile(path + ".svg")
	return string(is), err
}

func sample() chart.Chart {
	return chart.Chart{Width: 8, Height: 5, Panels: []chart.Panel{
		{Title: "Delay", X: "load", Y: "milliseconds", LogY: true, Lines: []chart.Line{
			{Name: "socket", Ink: chart.Blue, Dots: true, Points: [][2]float64{{0.5, 0.01}, {1.9, 1.4}}},
			{Name: "rings", Ink: chart.Vermilion, Dashed: true, Points: [][2]float64{{0.5, 0.007}, {1.9, 0.49}}},
		}},
		{Title: "Entries", X: "hours", Y: "entries", Head: 0.4, Legend: chart.TopLeft, Lines: []chart.Line{
			{Name: "all", Ink: chart.Dark, Points: [][2]float64{{0, 10}, {1, 20}}},
		}},
	}}
}

func TestPictureShowsWhatTheChartSays(t *testing.T) {
	svg, err := drawn(t, sample())
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{"Delay", "load", "milliseconds", "socket", "rings", "Entries", "hours", "entries", "all", "#0072B2", "#D55E00", "#444444"} {
		if !strings.Contains(svg, text) {
			t.Errorf("the picture lacks %q", text)
		}
	}
}

func TestBadChartsAreRefused(t *testing.T) {
	for _, c := range []struct {
		name, says string
		edit       func(*chart.Chart)
	}{
		{"zero on a logarithmic axis", `line "rings": the value 0 at 1`, func(c *chart.Chart) { c.Panels[0].Lines[1].Points[0] = [2]float64{1, 0} }},
		{"no panel", "at least one panel", func(c *chart.Chart) { c.Panels = nil }},
		{"no size", "a width", func(c *chart.Chart) { c.Width = 0 }},
		{"no colour", `colour "blue": must be #rrggbb`, func(c *chart.Chart) { c.Panels[1].Lines[0].Ink = "blue" }},
		{"no points", `panel "Entries": line "all"`, func(c *chart.Chart) { c.Panels[1].Lines[0].Points = nil }},
	} {
		t.Run(c.name, func(t *testing.T) {
			bad := sample()
			c.edit(&bad)
			if _, err := drawn(t, bad); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("said %v, want %q", err, c.says)
			}
		})
	}
	if err := picture("delay.json"); err == nil || !strings.Contains(err.Error(), chart.Suffix) {
		t.Errorf("a file of another name: %v", err)
	}
}
