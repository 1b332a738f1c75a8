package source

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/kube/translate"
)

// lacking has the Services without an endpoint that takes connections, until that becomes a fault: a
// new Service, or one whose pods are replaced, has none for a moment.
type lacking struct {
	grace  time.Duration // 0: it is never a fault
	since  map[translate.Key]time.Time
	names  map[translate.Key]string // of the balancer's services
	faulty map[translate.Key]bool
}

func newLacking(grace time.Duration) lacking {
	return lacking{grace, map[translate.Key]time.Time{}, map[translate.Key]string{}, map[translate.Key]bool{}}
}

// interval returns the interval at which the age is looked at.
func (l *lacking) interval() time.Duration {
	if l.grace == 0 {
		return lookInterval
	}
	return max(time.Millisecond, min(l.grace/2, lookInterval))
}

// note records which services of a Service have no endpoint now. It reports whether a fault has changed.
func (l *lacking) note(key translate.Key, names []string) (changed bool) {
	var short []string
	for _, name := range names { // the services of one port differ in the part after @
		name, _, _ = strings.Cut(name, "@")
		if !slices.Contains(short, name) {
			short = append(short, name)
		}
	}
	text, was := strings.Join(short, ", "), l.faulty[key]
	switch {
	case l.grace == 0:
	case text == "":
		delete(l.since, key)
		delete(l.names, key)
		delete(l.faulty, key)
		return was
	case l.names[key] != text:
		if l.names[key] = text; l.since[key].IsZero() {
			l.since[key] = time.Now()
		}
		return was
	}
	return false
}

// age makes faults of the Services that have lacked endpoints for long enough, and reports whether there are more.
func (l *lacking) age(now time.Time) (more bool) {
	for key, since := range l.since {
		if !l.faulty[key] && now.Sub(since) >= l.grace {
			l.faulty[key], more = true, true
		}
	}
	return more
}

// faults returns the faults, by Service.
func (l *lacking) faults() (all []translate.Fault) {
	for _, key := range slices.Sorted(maps.Keys(l.faulty)) {
		all = append(all, translate.Fault{Code: translate.EndpointsMissing, Object: "Service " + key,
			Text:   fmt.Sprintf("%s: no endpoint takes connections, and TCP to it is refused", l.names[key]),
			Remedy: "see whether pods match the Service's selector and are ready: `kubectl describe endpointslices`"})
	}
	return all
}
