package health

import (
	"net/netip"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// rampSteps is the number of changes of a backend's weight while it starts slowly. Each changes the service's
// table.
const rampSteps = 10

// rampOf returns the present share of a backend's weight, in percent, and the time of the next step; 0 and
// zero: the whole weight.
func rampOf(up, now time.Time, slowStart time.Duration) (percent uint8, next time.Time) {
	if slowStart <= 0 || up.IsZero() {
		return 0, time.Time{}
	}
	step := slowStart / rampSteps
	done := now.Sub(up) / max(step, 1)
	if done >= rampSteps-1 || done < 0 {
		return 0, time.Time{}
	}
	return uint8(100 / rampSteps * (done + 1)), up.Add((done + 1) * step)
}

// found is the knowledge about a backend of a service.
type found struct {
	state model.HealthState
	ramp  uint8
}

// serve decides which backends take new flows, for each family separately, since a frontend's packets reach
// backends of one family. If fewer than Health.Panic percent of the backends live and no backup lives, all
// backends with a weight take flows. Otherwise the live backends do; if there are none, the live backups. An
// unreachable backend (lost) does not count as live as long as another backend lives: a network failure that hides
// all backends takes no service's backends away. serve returns the service with Idle, Down and Ramp of its backends
// set, and whether health is not believed.
func serve(service model.Service, of func(model.Backend) found, lost func(netip.Addr) bool) (_ model.Service, panics bool) {
	backends := make([]model.Backend, len(service.Backends))
	gone := make([]bool, len(service.Backends)) // out of reach, without an override
	for i, b := range service.Backends {
		f := of(b)
		if b.Override.Health != "" {
			f = found{state: b.Override.Health}
		}
		b.Observed = model.BackendObservation{Idle: f.state != model.HealthUp, Down: f.state == model.HealthDown, Ramp: f.ramp}
		backends[i], gone[i] = b, b.Override.Health == "" && lost(b.Address)
	}
	given := service.Backends
	service.Backends = backends
	for _, is4 := range []bool{true, false} {
		panics = serveFamily(service, gone, is4) || panics
	}
	if slices.Equal(backends, given) {
		service.Backends = given // the same slice, which need not be compared again
	}
	return service, panics
}

// leaveGone marks the unreachable backends as down, if a live one is left; otherwise it marks none.
func leaveGone(service model.Service, gone []bool, is4 bool) {
	left := false
	for i, b := range service.Backends {
		left = left || b.Address.Is4() == is4 && b.EffectiveWeight() > 0 && !b.Observed.Idle && !gone[i]
	}
	for i := range service.Backends {
		b := &service.Backends[i]
		if b.Address.Is4() != is4 {
			continue
		}
		if gone[i] = gone[i] && left; gone[i] {
			b.Observed = model.BackendObservation{Idle: true, Down: true}
		}
	}
}

func serveFamily(service model.Service, gone []bool, is4 bool) (panics bool) {
	leaveGone(service, gone, is4)
	var living, able, backups int
	for _, b := range service.Backends {
		lives := !b.Observed.Idle && b.EffectiveWeight() > 0
		switch {
		case b.Address.Is4() != is4 || b.EffectiveWeight() == 0:
		case b.Backup && lives:
			backups++
		case !b.Backup:
			able++
			if lives {
				living++
			}
		}
	}
	panics = backups == 0 && living*100 < int(service.Health.Panic)*able
	for i := range service.Backends {
		b := &service.Backends[i]
		switch {
		case b.Address.Is4() != is4:
		case b.Backup:
			b.Observed.Idle = b.Observed.Idle || living > 0
		case panics && b.Override.Health != model.HealthDown && !gone[i]:
			b.Observed = model.BackendObservation{}
		}
	}
	return panics
}
