package metrics

import "strconv"

// exposition is Prometheus' text format, version 0.0.4. It is written here because a scrape has
// a hundred thousand samples and more: client_golang builds a value of several objects for each.
type exposition struct {
	text []byte
	name string
}

// family begins a family.
func (e *exposition) family(f *Family) {
	e.name = f.Name
	e.text = append(e.text, "# HELP "...)
	e.text = append(e.text, f.Name...)
	e.text = append(e.text, ' ')
	e.text = append(e.text, f.Help...) // no backslash and no line break: a test looks
	e.text = append(e.text, "\n# TYPE "...)
	e.text = append(e.text, f.Name...)
	e.text = append(e.text, ' ')
	e.text = append(e.text, f.Kind...)
	e.text = append(e.text, '\n')
}

// begin writes a sample up to its value; both parts of the labels may be empty.
func (e *exposition) begin(labels, more string) {
	e.text = append(e.text, e.name...)
	if labels != "" || more != "" {
		e.text = append(e.text, '{')
		e.text = append(e.text, labels...)
		if labels != "" && more != "" {
			e.text = append(e.text, ',')
		}
		e.text = append(e.text, more...)
		e.text = append(e.text, '}')
	}
	e.text = append(e.text, ' ')
}

// whole writes a sample of a whole number.
func (e *exposition) whole(labels string, value uint64) {
	e.begin(labels, "")
	e.text = append(strconv.AppendUint(e.text, value, 10), '\n')
}

// number writes a sample of any number.
func (e *exposition) number(labels string, value float64) {
	e.begin(labels, "")
	e.text = append(strconv.AppendFloat(e.text, value, 'f', -1, 64), '\n')
}

// pair writes a sample for each direction.
func (e *exposition) pair(labels string, valueIn, valueOut uint64) {
	e.begin(labels, in)
	e.text = append(strconv.AppendUint(e.text, valueIn, 10), '\n')
	e.begin(labels, out)
	e.text = append(strconv.AppendUint(e.text, valueOut, 10), '\n')
}
