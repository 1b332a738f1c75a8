package detect

import (
	"fmt"
	"maps"
	"slices"

	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// ThinMax is the level at which no event of a type is kept. At a lower level, one in 2^level is kept.
const ThinMax = 8

// Thinned has the part of a type's events that is left out, and their number.
type Thinned struct {
	Type    string `json:"type"`
	OneOf   uint64 `json:"one_of"` // one in this number is kept; 0: none
	LeftOut uint64 `json:"left_out"`
}

// Thin makes the programs leave out events by type, to save CPU; types that levels does not name are kept whole. Events that are left out are
// counted, and are no loss of the streams.
func (w *Watch) Thin(levels map[string]int) error {
	for number, word := range typeWords {
		mask := uint64(1)<<levels[word] - 1
		if levels[word] >= ThinMax {
			mask = ^uint64(0)
		}
		if err := w.set.Maps[detectMapShD_masks].Put(uint32(number), mask); err != nil {
			return fmt.Errorf("leave out events of %s: %w", word, err)
		}
	}
	return nil
}

// Thinned returns the number of events left out so far, for types that lost some.
func (w *Watch) Thinned() (all []Thinned, err error) {
	for _, number := range slices.Sorted(maps.Keys(typeWords)) {
		word := typeWords[number]
		var mask uint64
		var by []detectDetectShed
		if err := w.set.Maps[detectMapShD_masks].Lookup(uint32(number), &mask); err != nil {
			return nil, fmt.Errorf("read which share is left out: %w", err)
		}
		if err := w.set.Maps[detectMapShD_sheds].Lookup(uint32(number), &by); err != nil {
			return nil, fmt.Errorf("read the number of events left out: %w", err)
		}
		one := Thinned{Type: word, OneOf: mask + 1} // all bits: 0
		for _, of := range by {
			one.LeftOut += of.LeftOut
		}
		if mask != 0 || one.LeftOut > 0 {
			all = append(all, one)
		}
	}
	return all, nil
}

// shedNow returns the number of events left out so far, and err or otherwise the error of reading it.
func (w *Watch) shedNow(err error) (sum uint64, _ error) {
	all, bad := w.Thinned()
	for _, one := range all {
		sum += one.LeftOut
	}
	if err == nil {
		err = bad
	}
	return sum, err
}

// Received returns the number of events of each type that were read.
func (w *Watch) Received() map[string]uint64 {
	w.counting.Lock()
	defer w.counting.Unlock()
	return maps.Clone(w.received)
}

func (w *Watch) countType(e *rule.Event) {
	w.counting.Lock()
	defer w.counting.Unlock()
	w.received[e.Type]++
}
