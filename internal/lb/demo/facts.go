package demo

import (
	"github.com/shunt-lb/shunt/internal/story"
)

// Facts are the demo's findings; their JSON is `shunt demo -o json`.
type Facts struct {
	OK       bool         `json:"ok"` // every claim is true
	ID       string       `json:"id"`
	Instance string       `json:"instance"`
	Seconds  float64      `json:"seconds"`
	Steps    []Step       `json:"steps"`
	Topology string       `json:"topology"`
	Config   string       `json:"config"`
	Attached []Attachment `json:"attached"`
	Spread   []Spread     `json:"spread"`
	Paths    []Path       `json:"ways"`
	Crash    Crash        `json:"crash"`
	Reload   Reload       `json:"reload"`
	Kill     Kill         `json:"kill"`
	Counted  Counted      `json:"counted"`
	Claims   story.Claims `json:"claims"`
}

// Step is a part of the demo.
type Step struct {
	Title   string  `json:"title"`
	Seconds float64 `json:"seconds"`
}

// Attachment is an interface that the data plane runs on.
type Attachment struct {
	Interface string `json:"interface"`
	Mode      string `json:"mode"`
}

// Spread is how new flows to one frontend were distributed.
type Spread struct {
	Service  string  `json:"service"`
	Protocol string  `json:"protocol"`
	Family   string  `json:"family"`
	VIP      string  `json:"vip"`
	Flows    int     `json:"flows"` // each with a source port of its own
	Failed   int     `json:"failed"`
	Backends []Share `json:"backends"`
	// ChiSquare measures the distance from the weights; Chance is how probable a distance
	// as large as this is if every flow is placed by weighted lot.
	ChiSquare float64 `json:"chi_square"`
	Chance    float64 `json:"chance"`
}

// Share is one backend's part of the flows.
type Share struct {
	Name     string  `json:"name"`
	Weight   int     `json:"weight"`
	Flows    int     `json:"flows"`
	Expected float64 `json:"expected"`
}

// Path is one packet and its answer, each before and after the rewrite.
type Path struct {
	Family  string `json:"family"`
	Backend string `json:"backend"`
	Hops    []Hop  `json:"hops"` // client to lb, lb to backend, backend to lb, lb to client
}

// Hop is a packet between two hosts.
type Hop struct {
	From           string `json:"from"`
	To             string `json:"to"`
	Source         string `json:"source"`
	Destination    string `json:"destination"`
	TTL            uint8  `json:"ttl"` // or hop limit
	SourceMAC      string `json:"source_mac"`
	DestinationMAC string `json:"destination_mac"`
	Flags          string `json:"flags"` // of TCP: S for SYN, A for ACK
	// Checksum is "correct", "partial" (left to hardware that does not exist) or "wrong".
	Checksum string `json:"checksum"`
}

// Crash describes the flows after the servers of a backend were killed.
type Crash struct {
	Backend        string         `json:"backend"`
	DetectedMillis float64        `json:"detected_after_milliseconds"`
	BoundMillis    float64        `json:"checks_allow_milliseconds"`
	Flows          int            `json:"flows"` // open, with requests flowing, of both protocols
	FlowsOnIt      int            `json:"flows_on_it"`
	TakenOver      map[string]int `json:"taken_over"` // by backend
	Requests       int            `json:"requests"`
	Failed         int            `json:"requests_failed"`
	NewFlows       int            `json:"new_flows"`
	NewFailed      int            `json:"new_flows_failed"`
	// LastFailedMillis is the time from the kill to the beginning of the last failed request.
	LastFailedMillis float64 `json:"last_failure_began_after_milliseconds"`
	BackMillis       float64 `json:"back_after_milliseconds"` // from its start
	BackFlows        int     `json:"new_flows_after"`
	BackFailed       int     `json:"new_flows_failed_after"`
	BackOnIt         int     `json:"new_flows_on_it_after"`
}

// Reload describes the flows after a backend was removed from the file.
type Reload struct {
	Removed       string  `json:"removed"`
	Difference    string  `json:"difference"` // as `shunt reload` prints it
	Milliseconds  float64 `json:"milliseconds"`
	Flows         int     `json:"flows"` // open, with requests flowing, of both protocols
	FlowsOnIt     int     `json:"flows_on_removed_backend"`
	FlowsMoved    int     `json:"flows_moved"`
	OthersMoved   int     `json:"other_flows_moved"`
	OthersFailed  int     `json:"other_requests_failed"`
	Requests      int     `json:"requests"`
	NewFlows      int     `json:"new_flows"`
	NewFailed     int     `json:"new_flows_failed"`
	NewOnIt       int     `json:"new_flows_on_removed_backend"`
	SlotsMoved    int     `json:"slots_moved"`
	SlotsOfOthers int     `json:"slots_of_others"`
	OthersSlots   int     `json:"slots_of_others_moved"`
}

// Kill describes the flows after the daemon was killed and started again.
type Kill struct {
	SecondsDead    float64 `json:"seconds_dead"`
	Status         string  `json:"status"` // the output of `shunt status` meanwhile
	Flows          int     `json:"flows"`
	Requests       int     `json:"requests"`
	Failed         int     `json:"requests_failed"`
	FlowsMoved     int     `json:"flows_moved"`
	NewFlows       int     `json:"new_flows"`
	NewFailed      int     `json:"new_flows_failed"`
	SlowestMillis  float64 `json:"slowest_request_milliseconds"`
	PIDBefore      int     `json:"pid_before"`
	PIDAfter       int     `json:"pid_after"`
	TakeoverMillis float64 `json:"takeover_milliseconds"`
}

// Counted compares the counters of the data plane with the clients' own counts.
type Counted struct {
	Backends []CountedBackend `json:"backends"` // before a backend was removed
	Services []CountedService `json:"services"` // at the end
	Reasons  map[string]Count `json:"reasons"`
}

// CountedBackend is one backend of one service and family.
type CountedBackend struct {
	Service string `json:"service"`
	Backend string `json:"backend"`
	Name    string `json:"name"`
	Made    int    `json:"flows_made"`
	Traffic
}

// CountedService is a service.
type CountedService struct {
	Service string `json:"service"`
	Made    int    `json:"flows_made"`
	Moved   int    `json:"flows_moved"` // by the crash and the reload: the data plane may make another flow of each
	Traffic
}

// Traffic counts packets and bytes.
type Traffic struct {
	PacketsIn    uint64 `json:"packets_in"` // from clients
	BytesIn      uint64 `json:"bytes_in"`
	PacketsOut   uint64 `json:"packets_out"`
	BytesOut     uint64 `json:"bytes_out"`
	FlowsCreated uint64 `json:"flows_created"`
}

// Count is how often something happened.
type Count struct {
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

func newFacts() *Facts {
	return &Facts{Steps: []Step{}, Attached: []Attachment{}, Spread: []Spread{}, Paths: []Path{},
		Counted: Counted{Backends: []CountedBackend{}, Services: []CountedService{}, Reasons: map[string]Count{}}}
}
