package reconcile

import (
	"net/netip"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// BackendRef names a backend by position and generation. A position is reused only with another generation, so
// a stale reference never finds another backend.
type BackendRef struct {
	Index      uint32 // 0 to 2^20-1; index 0 is never used and means "no backend"
	Generation uint8
}

// BackendRecord is a backend as the data plane knows it.
type BackendRecord struct {
	BackendRef
	model.BackendAddress
	// Draining: the backend has weight 0 in every service that names it. A client of affinity that opens
	// another connection is placed anew.
	Draining bool
	// Down: the backend is down in every service that names it, and takes no new flows either. Only established
	// TCP connections stay with it.
	Down bool
}

// SlotState decides whether a packet's flow is looked up. See docs/design/13-just-enough-tracking.md; the
// numbers are those of enum slot_state.
type SlotState uint8

// The states of a slot.
const (
	Settled    SlotState = 0 // the current backend, without a look-up
	Transition SlotState = 1 // remembered flows are followed, and new ones remembered
	Closing    SlotState = 2 // followed, but not remembered: a scan is due
	Marked     SlotState = 3 // followed, because some disagree with the current backend
)

// Slot is one element of a service's table: one word in the maps, written and read whole.
type Slot struct {
	State    SlotState
	Current  BackendRef
	Previous BackendRef // the backend of flows without an entry, in Transition; or none
	// PreviousDrains: the previous backend has weight 0 in this service.
	PreviousDrains bool
	// PreviousBefore: the previous backend is found in the table before, by the same hash. Previous is then the
	// zero reference.
	PreviousBefore bool
}

// ServiceRecord is a service as the data plane knows it. Offset and Size say where its
// slots lie; both change together, in one atomic word.
type ServiceRecord struct {
	Index      uint32
	Generation uint8
	Name       string
	Forwarding model.Forwarding
	Seed       uint32 // of the flow hash; derived from the name, so that a fleet agrees
	Offset     uint32 // first slot
	Size       uint32 // slots; 0: the service has no table and answers no client
	// BeforeOffset and BeforeSize are the table that Slot.PreviousBefore refers to.
	// BeforeSize 0: there is none.
	BeforeOffset, BeforeSize uint32
	Tracking                 model.Tracking
	AffinityTimeout          time.Duration // 0: none
	Policy                   model.Policy
}

// AddressRecord decides how the data plane treats packets to one of our addresses.
type AddressRecord struct {
	Address  netip.Addr
	VIP      bool // a frontend has this address
	Source   bool // full NAT sends from this address
	HostOwn  bool // the host has it, too: its kernel answers ARP, ND and echo
	Announce bool // answer ARP and ND (once ownership is established)
	Direct   bool // a frontend of a direct-return service has this address
}

// Contents is everything the reconciler keeps in the maps.
type Contents struct {
	Backends  map[uint32]BackendRecord
	Services  map[uint32]ServiceRecord
	Frontends map[model.Frontend]uint32 // service index
	Addresses map[netip.Addr]AddressRecord
	Slots     map[uint32]Table // by service index, ServiceRecord.Size long
	// BeforeSlots are the slots of the table before, by service index, BeforeSize long.
	BeforeSlots map[uint32]Table
	// Filters say whether a prefix of sources may use a service; they include filters of services that are
	// gone.
	Filters map[Filter]bool
	// Generations of positions that are free now and were used before.
	BackendGenerations map[uint32]uint8
	ServiceGenerations map[uint32]uint8
}

// Member is a backend of a tenant of a service's position.
type Member struct {
	Service    uint32 // index
	Generation uint8  // of the service
	Backend    BackendRef
}

// Maps is the only access to the kernel. Puts are idempotent and replace; deleting a missing entry succeeds.
// Every call may fail, even after it has taken effect: the reconciler then reads nothing back but tries the
// same call again. Not safe for concurrent use.
type Maps interface {
	// Contents reads all contents, for adoption at start.
	Contents() (Contents, error)
	PutBackend(BackendRecord) error
	DeleteBackend(BackendRef) error
	PutService(ServiceRecord) error
	DeleteService(index uint32, generation uint8) error
	PutFrontend(f model.Frontend, serviceIndex uint32) error
	DeleteFrontend(f model.Frontend) error
	// PutFilter says whether a prefix of sources may use a service.
	PutFilter(f Filter, allow bool) error
	DeleteFilter(f Filter) error
	PutAddress(AddressRecord) error
	DeleteAddress(netip.Addr) error
	// WriteSlots stores the slots from offset on, each with one aligned atomic store.
	WriteSlots(offset uint32, slots Table) error
	// ScanRemembered goes through the remembered flows once. It deletes flows that are over,
	// and in slots that are Closing or Marked the flows that agree with the slot (unless their
	// service remembers always). It returns the positions, in the array of slots, of Closing
	// and Marked slots for which a living flow remembers another living backend than the
	// current one. After an error some may have been deleted, and it may be called again.
	ScanRemembered() (map[uint32]bool, error)
	// ServiceFlows counts the open flows of services that translate, by index: connections that have been
	// answered and are not closed, and conversations over UDP.
	ServiceFlows() (map[uint32]uint64, error)
	// EndStrays ends every flow, tracked or remembered, whose backend is not among members as a member of its
	// service. After an error some flows may have ended, and it may be called again.
	EndStrays(members []Member) error
	// Grace returns when every program run that began before the call has ended, so that no program can still
	// hold an entry that was unlinked before the call.
	Grace() error
}
