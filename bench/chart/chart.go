// Package chart describes a picture of measurements. The module in bench/draw draws it, so that
// the libraries of pictures and fonts are no dependency of shunt's.
//
//	Chart ──Write──► NAME.chart.json ──go run -C bench/draw──► NAME.png, NAME.svg
package chart

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Chart is one picture.
type Chart struct {
	Width, Height float64 // inches
	Panels        []Panel // from top to bottom
}

// Panel is one pair of axes with its lines.
type Panel struct {
	Title  string
	X, Y   string  // labels of the axes, with the unit
	LogY   bool    // a logarithmic vertical axis: no value may be 0
	Head   float64 // room above the highest value, as a share of it
	Legend Corner
	Lines  []Line
}

// Corner is the place of a legend.
type Corner string

// The corners.
const (
	TopLeft  Corner = "top left"
	TopRight Corner = "top right"
)

// Line is a series of points.
type Line struct {
	Name   string
	Ink    Ink
	Dashed bool
	Dots   bool // a mark on each point, another for each line
	Points [][2]float64
}

// Ink is a colour as #rrggbb.
type Ink string

// Colours that stay apart for the colour-blind (Okabe and Ito, "Color Universal Design"), and two greys.
const (
	Vermilion Ink = "#d55e00"
	Blue      Ink = "#0072b2"
	Green     Ink = "#009e73"
	Purple    Ink = "#cc79a7"
	Orange    Ink = "#e69f00"
	Grey      Ink = "#999999"
	Dark      Ink = "#444444"
)

// Suffix ends the name of a chart's file.
const Suffix = ".chart.json"

// Write describes the chart in path + Suffix.
func (c Chart) Write(path string) error {
	text, err := json.MarshalIndent(c, "", "\t")
	if err != nil {
		return fmt.Errorf("describe the picture %s: %w", path, err)
	}
	if err := os.WriteFile(path+Suffix, append(text, '\n'), 0o644); err != nil {
		return fmt.Errorf("write the data of a picture: %w", err)
	}
	return nil
}

// Draw has the chart at path drawn as path + ".png" and path + ".svg". It runs in the repository's root, and needs
// the go command.
func Draw(path string) error {
	file, err := filepath.Abs(path + Suffix)
	if err != nil {
		return err
	}
	command := exec.Command("go", "run", "-C", "bench/draw", ".", file)
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("draw %s: %w\n%sThe data is there; draw it in the repository's root by: go run -C bench/draw . %s", file, err, output, file)
	}
	return nil
}
