package main

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// manner is a way to replace a backend.
type manner struct {
	name, what string
	drains     bool
	named      bool // the new backend has the old one's name, and with it its slots
}

var manners = []manner{
	{"drain", "weight 0 for the old backend when the new one comes; it is removed one interval later", true, false},
	{"swap", "the old backend removed and the new one added in one reload", false, false},
	{"drain-same-name", "the same, and the new one takes over the old one's name", true, true},
	{"swap-same-name", "the same, and the new one takes over the old one's name", false, true},
}

// change is a reload at a moment.
type change struct {
	at       time.Duration
	backends []model.Backend
	removed  netip.Addr // the backend that goes, if one does
}

// Times of the simulation.
const (
	step     = 10 * time.Second // in which the table ages, and after which the daemon sweeps
	sampling = 3 * step
	quiet    = 10 * time.Minute // before the first change
	after    = time.Hour        // after the last
)

// beginning is the time of the i-th replacement.
func beginning(o options, i int) time.Duration { return quiet + time.Duration(i)*o.interval }

// replacing is the time from the first replacement to an interval after the last.
func replacing(o options) (from, to time.Duration) {
	return beginning(o, 0), beginning(o, o.changes)
}

// backends lists the backends from first on, that is, after so many replacements.
func (m manner) backends(first int) []model.Backend {
	var list []model.Backend
	for i := range backendCount {
		address := model.BackendAddress{Address: backendAddress(first + i)}
		name := address.String()
		if m.named {
			name = fmt.Sprintf("place %d", (first+i)%backendCount)
		}
		list = append(list, model.Backend{BackendAddress: address, Weight: 1, Name: name})
	}
	return list
}

// changes are the reloads of a run. The removal of a drained backend is a reload of its
// own, before the next replacement.
func (m manner) changes(o options) []change {
	var all []change
	for i := range o.changes {
		at, next := beginning(o, i), m.backends(i+1)
		if !m.drains {
			all = append(all, change{at, next, backendAddress(i)})
			continue
		}
		old := m.backends(i)[0]
		old.Weight, old.Name = 0, old.BackendAddress.String()
		all = append(all, change{at, append([]model.Backend{old}, next...), netip.Addr{}},
			change{at + o.interval, next, backendAddress(i)})
	}
	return all
}
