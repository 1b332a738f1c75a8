// Package spread sums up the measurements of a benchmark's rounds.
package spread

import (
	"fmt"
	"slices"
)

// Spread is the median of some values, with the smallest and the largest.
type Spread struct{ Median, Min, Max float64 }

// Of panics for no values: a report must not have a figure that was not measured.
func Of(values []float64) Spread {
	sorted := slices.Sorted(slices.Values(values))
	middle := len(sorted) / 2
	s := Spread{sorted[middle], sorted[0], sorted[len(sorted)-1]}
	if len(sorted)%2 == 0 {
		s.Median = (sorted[middle-1] + sorted[middle]) / 2
	}
	return s
}

// Median is 0 for no values.
func Median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	return Of(values).Median
}

// Text has the figures in a format of fmt.
func (s Spread) Text(format string) string {
	return fmt.Sprintf(format+" ["+format+" to "+format+"]", s.Median, s.Min, s.Max)
}
