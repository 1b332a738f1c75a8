// Package line has the lines that all diagnosing tools write in the same form: for programs, one JSON object a line.
package line

import (
	"fmt"
	"io"

	"github.com/shunt-lb/shunt/sensor"
)

// Sensor has the way in which a sensor is attached.
type Sensor struct {
	Sensor  string    `json:"sensor"`
	Watches string    `json:"watches"`
	Way     string    `json:"way"`   // "": none
	Loses   string    `json:"loses"` // "": nothing
	Refused []Refused `json:"refused"`
}

// Refused is a way that the kernel refused.
type Refused struct {
	Way    string `json:"way"`
	Reason string `json:"reason"`
}

// Start is the first line of a tool, or its beginning.
type Start struct {
	Type    string   `json:"type"` // start
	BTF     string   `json:"btf"`  // source of the kernel's types
	Sensors []Sensor `json:"sensors"`
}

// NewStart returns the first line of a tool with these results of attaching.
func NewStart(results []sensor.Result, btf string) Start {
	return Start{"start", btf, Sensors(results)}
}

// Sensors returns results as lines.
func Sensors(results []sensor.Result) []Sensor {
	lines := []Sensor{}
	for _, r := range results {
		l := Sensor{Sensor: r.Sensor.Name, Watches: r.Sensor.Watches, Loses: r.Sensor.Without, Refused: []Refused{}}
		if r.Got != nil {
			l.Way, l.Loses = r.Got.String(), r.Got.Loses
		}
		for _, f := range r.Refused {
			l.Refused = append(l.Refused, Refused{f.Way.String(), f.Reason})
		}
		lines = append(lines, l)
	}
	return lines
}

// Budget is a line of a tool without intervals: the changes that keep its budget.
type Budget struct {
	Type string `json:"type"` // budget
	sensor.Spending
}

// Spending writes the CPU time of the sensors, and the changes because of it.
func Spending(out io.Writer, s sensor.Spending) error {
	_, err := fmt.Fprintf(out, "sensors: %.1f %% of a CPU\n", s.Percent)
	if s.Change != "" {
		_, err = fmt.Fprintf(out, "budget: %s\n", s.Change)
	}
	return err
}
