// Package status describes an instance in the words of the API: read from the maps, which
// needs no daemon, and completed with the data that only the daemon has.
package status

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/health"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/sock"
	"github.com/shunt-lb/shunt/internal/lb/state"
)

// The states of a backend, over all its services.
const (
	StateActive   = "active"
	StateDraining = "draining" // no new flows, because of its weight or a drain
	StateOut      = "out"      // the deadline of its drain has passed
	StateDown     = "down"     // by its checks, or because an operator says so
	StateWaiting  = "waiting"  // for its first successful check
	StateStandby  = "standby"  // a backup that is not needed
)

// States lists every state.
var States = []string{StateActive, StateDraining, StateOut, StateDown, StateWaiting, StateStandby}

// Read adds the contents of an instance's data plane to s. beat is the time of a daemon's last heartbeat, with
// the precision of a tick of the kernel.
func Read(view *store.View, s *shuntv1.GetStatusResponse) (beat time.Time, err error) {
	contents, err := view.Contents()
	if err != nil {
		return beat, err
	}
	counters, err := view.Counters()
	if err != nil {
		return beat, err
	}
	open, err := view.OpenFlows()
	if err != nil {
		return beat, err
	}
	age, _, err := view.HeartbeatAge()
	if err != nil {
		return beat, err
	}
	beat = time.Now().Add(-age) // at once: reading the rest takes its time
	attachments, err := attach.Attachments(view)
	if err != nil {
		return beat, err
	}
	s.Forwarding, s.HeartbeatAgeSeconds = true, age.Seconds()
	s.Services, s.Reasons = services(contents, counters, open), map[string]*shuntv1.Count{}
	for _, a := range attachments {
		s.Attached = append(s.Attached, &shuntv1.Attachment{Interface: a.Interface, Mode: string(a.Mode), Reason: a.Reason})
	}
	for name, c := range counters.Reasons {
		if c.Packets > 0 {
			s.Reasons[name] = &shuntv1.Count{Packets: c.Packets, Bytes: c.Bytes}
		}
	}
	s.Backends = backends(s.Services, contents, counters, open)
	s.Sockets, err = sock.PinnedOutcomes("", s.Instance)
	return beat, err
}

// services joins the records of a service: it has one per address family.
func services(contents reconcile.Contents, counters store.Counters, open store.OpenFlows) []*shuntv1.Service {
	frontends := map[uint32][]string{}
	for f, index := range contents.Frontends {
		if f.Configured() {
			frontends[index] = append(frontends[index], f.String())
		}
	}
	byName := map[string]*shuntv1.Service{}
	for _, index := range slices.Sorted(maps.Keys(contents.Services)) {
		record := contents.Services[index]
		service := byName[record.Name]
		if service == nil {
			service = &shuntv1.Service{Name: record.Name, Forwarding: string(record.Forwarding)}
			byName[record.Name] = service
		}
		t := counters.Services[index]
		service.PacketsIn += t.PacketsIn
		service.BytesIn += t.BytesIn
		service.PacketsOut += t.PacketsOut
		service.BytesOut += t.BytesOut
		service.FlowsCreated += t.FlowsCreated
		tracked := !record.Forwarding.Direct()
		if tracked {
			service.FlowsOpen = proto.Uint64(service.GetFlowsOpen() + open.Services[index])
		}
		service.Frontends = append(service.Frontends, frontends[index]...)
		slots := map[uint32]uint32{}
		for _, slot := range contents.Slots[index].All() {
			slots[slot.Current.Index]++
			if slot.State == reconcile.Transition {
				slots[slot.Previous.Index] += 0 // it is shown as long as flows may be there
			}
		}
		delete(slots, 0)
		for _, i := range slices.Sorted(maps.Keys(slots)) {
			t := counters.Backends[i]
			b := &shuntv1.ServiceBackend{
				Address: contents.Backends[i].BackendAddress.String(), Slots: slots[i],
				Share:     float64(slots[i]) / float64(len(contents.Slots[index])),
				Draining:  contents.Backends[i].Draining,
				PacketsIn: t.PacketsIn, BytesIn: t.BytesIn, PacketsOut: t.PacketsOut, BytesOut: t.BytesOut, FlowsCreated: t.FlowsCreated}
			if tracked {
				b.FlowsOpen = proto.Uint64(open.Backends[i])
			}
			service.Backends = append(service.Backends, b)
		}
	}
	var all []*shuntv1.Service
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		slices.Sort(byName[name].Frontends)
		all = append(all, byName[name])
	}
	return all
}

// backends turns services of backends into backends of services. A backend that no slot names appears without
// services: only the daemon knows its services.
func backends(services []*shuntv1.Service, contents reconcile.Contents, counters store.Counters, open store.OpenFlows) []*shuntv1.Backend {
	byAddress := map[string]*shuntv1.Backend{}
	for index, record := range contents.Backends {
		t := counters.Backends[index]
		b := &shuntv1.Backend{Address: record.BackendAddress.String(), State: StateActive,
			PacketsIn: t.PacketsIn, BytesIn: t.BytesIn, PacketsOut: t.PacketsOut, BytesOut: t.BytesOut, FlowsCreated: t.FlowsCreated}
		switch {
		case record.Down:
			b.State = StateDown
		case record.Draining:
			b.State = StateDraining
		}
		if n := open.Backends[index]; n > 0 { // also for a backend without slots
			b.FlowsOpen = &n
		}
		byAddress[b.Address] = b
	}
	for _, service := range services {
		for _, in := range service.Backends {
			b := byAddress[in.Address]
			if b == nil {
				continue // it went while the maps were read
			}
			if !slices.Contains(b.Services, service.Name) {
				b.Services = append(b.Services, service.Name)
			}
			openIn(service.Forwarding, b)
			b.Slots += in.Slots
		}
	}
	return sorted(byAddress)
}

// openIn makes a backend of a service that tracks its flows report the number of open flows, even if it is 0.
func openIn(forwarding string, b *shuntv1.Backend) {
	if b.FlowsOpen == nil && !model.Forwarding(forwarding).Direct() {
		b.FlowsOpen = proto.Uint64(0)
	}
}

func sorted(byAddress map[string]*shuntv1.Backend) []*shuntv1.Backend {
	var all []*shuntv1.Backend
	for _, address := range slices.Sorted(maps.Keys(byAddress)) {
		all = append(all, byAddress[address])
	}
	return all
}

// Known is the daemon's knowledge about backends.
type Known struct {
	Configured []*model.Service // before overrides
	Served     []*model.Service // as applied, with overrides and health
	Overrides  []state.Override
	Health     []health.Status
}

// Complete adds the daemon's knowledge about backends. s.Daemon.Overrides are known.Overrides.
func Complete(s *shuntv1.GetStatusResponse, known Known) {
	byAddress := map[string]*shuntv1.Backend{}
	inMaps := map[string]bool{}
	for _, b := range s.Backends {
		byAddress[b.Address] = b
		inMaps[b.Address] = true
	}
	for _, service := range known.Configured {
		for _, backend := range service.Backends {
			address := backend.BackendAddress.String()
			b := byAddress[address]
			if b == nil { // no slot names it
				b = &shuntv1.Backend{Address: address, State: StateActive}
				byAddress[address] = b
			}
			b.Services = insert(b.Services, service.Name)
			openIn(string(service.Forwarding), b)
			if called := cmp.Or(backend.DNS, backend.Name); called != address {
				b.Names = insert(b.Names, called)
			}
		}
	}
	for address, state := range overall(known.Served) {
		// A backend's record says that it is down before all tables have changed: until then it is active.
		if b := byAddress[address]; b != nil && (state != StateActive || b.State == StateDown) {
			b.State = state
		}
	}
	for _, h := range known.Health {
		if b := byAddress[h.Backend]; b != nil {
			b.Health = append(b.Health, backendHealth(h))
		}
	}
	for i, o := range known.Overrides {
		b := byAddress[o.Backend.String()]
		if b == nil {
			continue // it has just left the configuration
		}
		b.Overrides = append(b.Overrides, s.Daemon.Overrides[i])
		switch {
		case o.Over && !inMaps[b.Address]:
			b.State = StateOut
		case o.Over:
			b.State = StateDraining
		}
	}
	s.Backends = sorted(byAddress)
	completeServices(s.Services, byAddress, known)
}

// completeServices adds to each service the names and states of its backends, and the backends that no slot
// names.
func completeServices(services []*shuntv1.Service, byAddress map[string]*shuntv1.Backend, known Known) {
	type member struct{ service, address string }
	states := map[member]string{}
	for _, service := range known.Served {
		for _, b := range service.Backends {
			states[member{service.Name, b.BackendAddress.String()}] = StateOf(b)
		}
	}
	byName := map[string]*shuntv1.Service{}
	for _, service := range services {
		byName[service.Name] = service
	}
	for _, configured := range known.Configured {
		service := byName[configured.Name]
		if service == nil {
			continue // it has just come, or gone
		}
		service.Pool = configured.Pool
		inSlots := map[string][]*shuntv1.ServiceBackend{} // twice, where it serves both families
		for _, b := range service.Backends {
			inSlots[b.Address] = append(inSlots[b.Address], b)
		}
		for _, backend := range configured.Backends {
			address := backend.BackendAddress.String()
			if inSlots[address] == nil {
				t := byAddress[address]
				added := &shuntv1.ServiceBackend{Address: address,
					PacketsIn: t.PacketsIn, BytesIn: t.BytesIn, PacketsOut: t.PacketsOut, BytesOut: t.BytesOut, FlowsCreated: t.FlowsCreated}
				if !configured.Forwarding.Direct() {
					added.FlowsOpen = t.FlowsOpen
				}
				service.Backends = append(service.Backends, added)
				inSlots[address] = []*shuntv1.ServiceBackend{added}
			}
			for _, b := range inSlots[address] {
				b.Name = backend.Name
				// A backend that is left out of all its services is not served, and has its overall state.
				b.State = cmp.Or(states[member{service.Name, address}], byAddress[address].State)
			}
		}
	}
}

// overall returns by address whether backends get new flows in any service, or the reason why not.
func overall(served []*model.Service) map[string]string {
	states := map[string]string{}
	for _, service := range served {
		for _, b := range service.Backends {
			address, state := b.BackendAddress.String(), StateOf(b)
			if state == StateActive || states[address] == "" {
				states[address] = state
			}
		}
	}
	return states
}

// StateOf returns active, or the reason why a backend gets no new flows in a service.
func StateOf(b model.Backend) string {
	switch {
	case b.Share() > 0:
		return StateActive
	case b.EffectiveWeight() == 0:
		return StateDraining
	case b.Observed.Down:
		return StateDown
	case b.Backup:
		return StateStandby
	}
	return StateWaiting
}

// insert adds a word to a sorted list in which each word occurs once.
func insert(list []string, word string) []string {
	if i, there := slices.BinarySearch(list, word); !there {
		return slices.Insert(list, i, word)
	}
	return list
}

// HeartbeatFresh is the age in seconds below which a daemon must be running: it beats every second.
const HeartbeatFresh = 1.5
