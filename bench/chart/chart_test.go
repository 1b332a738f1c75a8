package chart_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/bench/chart"
)

// Where a picture cannot be drawn, its data stays, and the message says how to draw it.
func TestDataStaysWherePictureFails(t *testing.T) {
	t.Setenv("PATH", t.TempDir()) // no go
	path := filepath.Join(t.TempDir(), "delay")
	c := chart.Chart{Width: 8, Height: 5, Panels: []chart.Panel{{X: "load", Y: "ms", LogY: true, Head: 0.4, Legend: chart.TopRight, Lines: []chart.Line{
		{Name: "socket", Ink: chart.Blue, Dashed: true, Dots: true, Points: [][2]float64{{1, 2}}},
	}}}}
	if err := c.Write(path); err != nil {
		t.Fatal(err)
	}
	if err := chart.Draw(path); err == nil || !strings.Contains(err.Error(), "go run -C bench/draw . "+path+chart.Suffix) {
		t.Errorf("the message is %v", err)
	}
	text, err := os.ReadFile(path + chart.Suffix)
	if err != nil {
		t.Fatal(err)
	}
	var is chart.Chart
	if err := json.Unmarshal(text, &is); err != nil || !reflect.DeepEqual(is, c) {
		t.Errorf("the data is %+v (%v), want %+v", is, err, c)
	}
}
