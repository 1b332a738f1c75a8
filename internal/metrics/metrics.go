// Package metrics answers Prometheus: an instance's state and counters, over HTTP.
//
//	daemon ─► Sample ─► Families, one after the other ─► text ─► GET /metrics
//
// It knows no other part of shunt: it is given a Sample.
package metrics

import (
	"slices"
	"time"
)

// Sample is the state of an instance at a moment. The caller fills it; Text may be called once.
type Sample struct {
	Version, GoVersion string
	Reloads            Reloads
	Conditions         []Condition
	// Balances reports whether the balancer runs. The following fields are the balancer's.
	Balances        bool
	Overrides       []Count // by kind
	Interfaces      []Interface
	Reasons         []Reason
	Sockets         []Count // calls by outcome; nil: no sockets are served
	Flows           Flows   // under NAT
	Remembered      Flows
	Slots           []Count // by state
	SourcePorts     uint64
	SourceAddresses []Count // by family
	Checks          Checks
	States          []string // that a Member may have
	Services        []Service
	// SeriesMax limits the series of services and backends; 0: no limit.
	SeriesMax uint64

	// Lends reports whether the UDP path runs. Leases are its leases, with the reasons why programs had none.
	Lends         bool
	Leases        []Lease
	LeasesRefused []Count

	// Accelerates reports whether the pod shortcut runs. PodAddresses are by state, the others by reason.
	Accelerates          bool
	PodAddresses         []Count
	PodNetworks          []Count // by state
	PodPackets, PodBytes []Count
	Pods                 []Pod
	Steers               []Steer

	// PairsSockets reports whether sockets are to be paired; messages and bytes are by reason, connections by
	// outcome.
	PairsSockets                                   bool
	SocketsPaired                                  uint64
	SocketMessages, SocketBytes, SocketConnections []Count

	Guard *Guard // nil: this is not the guard's process

	// Backends are the backends of the services that are reported.
	Backends []Backend

	series, seriesLeftOut, servicesLeftOut uint64
}

// Lease is an entry of the UDP path, over all its leases. matched = passed + delivered + waiting + dropped.
type Lease struct {
	Name                string
	Held                bool
	Given, Resumed      uint64  // resumed: leases among the given ones that an earlier daemon had lent
	Ended               []Count // by reason
	Matched, Delivered  uint64
	Passed              uint64 // to the kernel's socket
	FillEmpty, RingFull uint64 // dropped
	NoSocket            uint64 // dropped, too
	// Invalid and TxInvalid are addresses in the fill ring and descriptors in the transmit ring that are no frame's.
	Invalid, TxInvalid uint64
	Claims             *LeaseClaims // nil: none
	Queues             []LeaseQueue
	Counts             []QueueCounts // of each queue that one of its leases has had
}

// LeaseClaims are programs' statements about themselves: nobody can check them, and they are in no sum.
type LeaseClaims struct{ Stale, TxShort, Kicks, Wakeups uint64 }

// QueueCounts is the part of a Lease's counters that one queue has. Datagrams on queues that a lease does not have are in none.
type QueueCounts struct {
	Queue                                                     string
	Matched, Delivered, Passed, FillEmpty, RingFull, NoSocket uint64
}

// LeaseQueue is a queue of a lease that is held.
type LeaseQueue struct {
	Queue               string
	Waiting, Room, Free uint64
}

// Count is a number of things of one kind.
type Count struct {
	Of    string
	Count uint64
}

// Reloads has the results of reading the configuration file.
type Reloads struct {
	Refused bool      // when it was last read
	Applied time.Time // the last time
}

// Condition is the number of conditions of a code and a severity that hold.
type Condition struct {
	Code, Severity string
	Count          uint64
}

// Interface is one that shunt is attached to.
type Interface struct {
	Name, Mode string
	Missed     *uint64 // frames; nil: that cannot be known
}

// Reason is the number of packets that were not simply forwarded, for one reason.
type Reason struct {
	Name           string
	Packets, Bytes uint64
}

// Flows has the use of a table of flows.
type Flows struct {
	Limit            uint64
	Known            bool // it has been counted
	All, Established uint64
}

// Checks counts health checks by result.
type Checks struct {
	Results []Count // by result
	Late    uint64
}

// Traffic counts packets and bytes of a service, or of a backend.
type Traffic struct {
	PacketsIn, BytesIn, PacketsOut, BytesOut, FlowsCreated uint64
}

// Service is one service.
type Service struct {
	Name string
	Traffic
	Counted bool   // Open is known
	Open    uint64 // flows in use
	Members []Member
	labels  string
}

// Backend is a backend over all its services.
type Backend struct {
	Address string // and port
	Traffic
	Counted bool // as Service's
	Open    uint64
	leftOut bool
	labels  string
}

// Member is a backend in a service.
type Member struct {
	Backend int // its index in Sample.Backends
	Name    string
	State   string
	Weight  float64 // that counts now
	Checked bool
	Up      bool   // as checks say
	Changes uint64 // of that
	labels  string
}

const (
	// seriesOfBackend and seriesOfMember are the most that one has: the samples of Families with these
	// labels. A test compares them with an answer.
	seriesOfBackend = 6
	seriesOfMember  = 4
	// seriesOfService does not include the series for each state.
	seriesOfService = 6
)

// Text appends the answer to a scrape to the given text.
func (s *Sample) Text(to []byte) []byte {
	s.bound()
	s.label()
	e := exposition{text: to}
	families := slices.Clone(nodeFamilies)
	if s.Balances {
		families = append(families, balancerFamilies...)
	}
	if s.Lends {
		families = append(families, udpFamilies...)
	}
	if s.Accelerates {
		families = append(families, podFamilies...)
	}
	if s.PairsSockets {
		families = append(families, socketFamilies...)
	}
	if s.Guard != nil {
		families = append(families, guardFamilies...)
	}
	for i := range families {
		e.family(&families[i])
		families[i].write(&e, s)
	}
	return e.text
}

// bound leaves services out from the end, with the backends that no other has, until SeriesMax suffices.
func (s *Sample) bound() {
	known := make([]bool, len(s.Backends))
	told := 0
	for i := range s.Services {
		service := &s.Services[i]
		n := uint64(seriesOfService + len(s.States) + seriesOfMember*len(service.Members))
		for _, m := range service.Members {
			if !known[m.Backend] {
				known[m.Backend] = true
				n += seriesOfBackend
			}
		}
		if s.SeriesMax > 0 && (s.servicesLeftOut > 0 || s.series+n > s.SeriesMax) {
			s.servicesLeftOut++
			s.seriesLeftOut += n
			continue
		}
		s.series += n
		told++
	}
	if told == len(s.Services) {
		return
	}
	s.Services = s.Services[:told]
	clear(known)
	for i := range s.Services {
		for _, m := range s.Services[i].Members {
			known[m.Backend] = true
		}
	}
	for i := range s.Backends {
		s.Backends[i].leftOut = !known[i]
	}
}

// label writes the labels once that several families have.
func (s *Sample) label() {
	for i := range s.Services {
		service := &s.Services[i]
		service.labels = labels("service", service.Name)
		for j := range service.Members {
			m := &service.Members[j]
			m.labels = labels("service", service.Name, "backend", s.Backends[m.Backend].Address, "name", m.Name)
		}
	}
	for i := range s.Backends {
		s.Backends[i].labels = labels("backend", s.Backends[i].Address)
	}
}
