package cli

import (
	"bytes"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// RowsMax is the maximum length of a table in text, unless all rows are requested.
const RowsMax = 100

// First returns the part of a list that is shown, and the number of the other entries.
func First[T any](list []T, most int, all bool) (shown []T, left int) {
	if all || len(list) <= most {
		return list, 0
	}
	return list[:most], len(list) - most
}

// Table aligns cells that are separated by tabs. Rows that lack the last cells do not end in
// spaces.
type Table struct {
	*tabwriter.Writer
	w       io.Writer
	aligned bytes.Buffer
}

// NewTable makes a table that Flush prints to w.
func NewTable(w io.Writer) *Table {
	t := &Table{w: w}
	t.Writer = tabwriter.NewWriter(&t.aligned, 0, 8, 2, ' ', 0)
	return t
}

// Flush prints the rows so far.
func (t *Table) Flush() {
	_ = t.Writer.Flush() // into memory
	for line := range strings.Lines(t.aligned.String()) {
		fmt.Fprintln(t.w, strings.TrimRight(line, " \n"))
	}
	t.aligned.Reset()
}
