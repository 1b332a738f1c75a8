package daemon

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/invopop/jsonschema"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/udp/hook"
)

// document is the UDP path's keys at the top of a file.
type document struct {
	config.Mark `json:"-"`
	UDP         config.List[leaseEntry] `json:"udp,omitempty" doc:"Datagrams that skip the kernel's stack. Each entry is a lease, which one program at a time gets by its name. See docs/guide/udp.md." example:"[{name: feed, interface: eth0, address: 192.0.2.10, port: 5000, allow: {user: feed}}]"`
	Socket      config.Text             `json:"udp_socket,omitempty" doc:"The path of the unix socket at which programs ask for a lease. Every user may connect; the entry's allow decides which processes get the lease." min:"1" max:"102" default:"/run/shunt/udp.sock" example:"/run/shunt/udp.sock"`
}

// leaseEntry is an element of udp.
type leaseEntry struct {
	config.Mark   `json:"-"`
	Name          config.Text                `json:"name" doc:"The name by which a program asks for the lease. It must be unique." min:"1" max:"63" example:"feed"`
	Interface     config.Text                `json:"interface" doc:"The network interface on which the datagrams arrive. It may be one of interfaces, too." min:"1" max:"15" example:"eth0"`
	Queues        config.Many[queue]         `json:"queues,omitempty" doc:"The receive queues of the interface whose datagrams go to the program: all, or a list of numbers. Datagrams that arrive on another queue go to the kernel's socket. A queue belongs to one lease at a time, so two entries that share a queue cannot be leased at once." default:"all" example:"[0, 1]"`
	Address       config.Many[destination]   `json:"address" doc:"The destination addresses of the datagrams. A multicast address is possible: the program then joins the group itself, with an ordinary socket." example:"[192.0.2.10, \"2001:db8::10\"]"`
	Port          config.Many[config.Number] `json:"port" doc:"The destination ports of the datagrams. An entry has up to 16 combinations of address and port." min:"1" max:"65535" example:"5000"`
	Mode          config.Word                `json:"mode,omitempty" doc:"How datagrams get into the program's memory: zero-copy has the driver write them there, copy has the kernel copy them, auto tries zero-copy and then copy. generic is for drivers without XDP, and slower than the other modes; either all entries of an interface are generic, or none is. shunt udp list shows the mode that a lease got." enum:"auto|zero-copy|copy|generic" default:"auto" example:"copy"`
	MaxQueueDelay config.Duration            `json:"max_queue_delay,omitempty" doc:"How long a datagram may wait in the receive ring for a program that keeps up with expected_rate. The ring has room for max_queue_delay x expected_rate datagrams, rounded down to a power of two, at least 64 and at most 65536. Datagrams that find the ring full are dropped and counted." min:"1us" max:"10s" default:"300us" example:"100us"`
	ExpectedRate  rate                       `json:"expected_rate,omitempty" doc:"How many datagrams per second the program can process on one queue." default:"1M" example:"250k"`
	TX            config.Boolean             `json:"tx,omitempty" doc:"Whether the program may also send through the lease, past the kernel's stack. It can then send any frame, with any source address, on this interface." default:"false" example:"true"`
	Timestamps    config.Boolean             `json:"timestamps,omitempty" doc:"Whether each datagram carries the time at which XDP saw it, so that the program can drop datagrams that are too old (Options.MaxAge, max_age_us). This costs one reading of the clock for each datagram." default:"false" example:"true"`
	Kill          config.Boolean             `json:"kill,omitempty" doc:"Whether shunt kills a process that keeps the sockets of a lease after the lease is over. If false, the process keeps the queues, and no other program can lease them." default:"false" example:"true"`
	OnNoSocket    config.Word                `json:"on_no_socket,omitempty" doc:"What happens to datagrams that no AF_XDP socket takes, because no program has the lease, or because the lease does not have the queue on which they arrive: pass leaves them to the kernel's socket on the same port, drop drops them while the daemon runs. Fragments, datagrams behind IP options, and all other packets that no AF_XDP socket could take pass in both cases. A reload that changes this key does not end the lease." enum:"pass|drop" default:"pass" example:"drop"`
	Allow         allowEntry                 `json:"allow" doc:"The processes that may have the lease. A process must match each key that is set; of a list, one value is enough. The kernel, not the process, says which user, groups and cgroup a process has." example:"{user: feed}"`
	Wait          config.Word                `json:"wait,omitempty" doc:"How shunt advises the program to wait for datagrams: spin looks at the rings all the time and keeps its CPU busy, adaptive looks for 50us and then sleeps, sleep sleeps at once. The program gets the advice with the lease, and follows it unless its own options say otherwise (udp.Options.Spin, spin_us). Without this key the program decides; by default it sleeps at once." enum:"spin|adaptive|sleep" example:"adaptive"`
	CPU           config.Many[config.Number] `json:"cpu,omitempty" doc:"The CPUs on which the program should work, for its queues in turn. The program gets them with the lease and pins its own threads (Queue.Pin, shunt_udp_pin), because only the program knows which thread serves which queue. Without this key: any CPU." min:"0" max:"8191" example:"[2, 3]"`
	BusyPoll      config.Duration            `json:"busy_poll,omitempty" doc:"Lets the program do the driver's work in place of interrupts: each time that the program asks for datagrams, interrupts stay off for this long. If the program does not ask again, the kernel polls the interface itself, and after two polls that find nothing it turns interrupts on again. Meanwhile every packet that arrives on the interface, also for another program, waits up to this long. The time is a setting of the interface (gro_flush_timeout; napi_defer_hard_irqs is 2), so all entries of one interface have the same time or none. When the entry or the daemon ends, shunt restores the earlier setting. Without this key: interrupts, as usual." min:"10us" max:"10ms" example:"200us"`
}

// allowEntry is an element of udp[].allow.
type allowEntry struct {
	config.Mark `json:"-"`
	User        config.Many[account]     `json:"user,omitempty" doc:"Users, by name or number." example:"feed"`
	Group       config.Many[account]     `json:"group,omitempty" doc:"Groups, by name or number: the process's own group, or a supplementary group." example:"[market, 1500]"`
	Cgroup      config.Many[config.Text] `json:"cgroup,omitempty" doc:"Control groups of the unified hierarchy, written as in /proc/PID/cgroup: the process is in this control group or in one below it." min:"1" max:"4095" example:"/system.slice/feed.service"`
}

// queue is the word for all receive queues, or the number of one.
type queue struct {
	config.Mark
	All    bool
	Number int
}

func (q *queue) Read(s config.Scalar, f *config.Field) *config.Complaint {
	const want = "all, or the numbers of receive queues"
	if s.Text == "all" && s.Kind != config.KindNumber {
		*q = queue{Mark: q.Mark, All: true}
		return nil
	}
	if s.Kind == config.KindText {
		if strings.EqualFold(s.Text, "dedicated") {
			return config.Complain("queues dedicated is not supported yet", "write the numbers of the queues, and steer the port to them: `ethtool -N INTERFACE flow-type udp4 dst-port PORT action QUEUE`")
		}
		suggestion := ""
		if near := config.Nearest(s.Text, []string{"all"}); near != "" {
			suggestion = fmt.Sprintf("did you mean %q?", near)
		}
		return config.Wanted(s, want, suggestion)
	}
	n, c := config.ReadNumber(s)
	switch {
	case c != nil:
		return config.Wanted(s, want, "")
	case n >= uint64(hook.MaxQueues):
		return config.Complain(fmt.Sprintf("queue %s is out of range: queues 0 to %d can have sockets", s.Text, hook.MaxQueues-1), "set fewer queues with `ethtool -L`")
	}
	*q = queue{Mark: q.Mark, Number: int(n)}
	return nil
}

func (*queue) Schema(*config.Field) *jsonschema.Schema {
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "integer", Minimum: "0", Maximum: jsonNumber(uint64(hook.MaxQueues - 1))},
		{Type: "string", Enum: []any{"all"}},
	}}
}

func (*queue) Describe() string { return "`all` or a number" }

// destination is the address that datagrams are sent to: a host's, or a multicast group's.
type destination struct {
	config.Mark
	Value netip.Addr
}

func (d *destination) Read(s config.Scalar, f *config.Field) *config.Complaint {
	if a, err := netip.ParseAddr(s.Text); err == nil && s.Kind == config.KindText && a.IsMulticast() && a.Zone() == "" && !a.Is4In6() {
		d.Value = a
		return nil
	}
	var host config.Address
	if c := host.Read(s, f); c != nil {
		return c
	}
	d.Value = host.Value
	return nil
}

func (*destination) Schema(f *config.Field) *jsonschema.Schema {
	return (&config.Address{}).Schema(f)
}

func (*destination) Describe() string { return "IP address" }

// rate is a number of datagrams per second.
type rate struct {
	config.Mark
	Value uint64
}

func jsonNumber(n uint64) json.Number { return json.Number(strconv.FormatUint(n, 10)) }

// rateMax is more than any network card receives.
const rateMax = 1_000_000_000

func (r *rate) Read(s config.Scalar, f *config.Field) *config.Complaint {
	want := "datagrams per second such as 250k or 1M"
	digits, factor := strings.TrimSuffix(s.Text, "/s"), uint64(1)
	for suffix, times := range map[string]uint64{"k": 1000, "M": 1_000_000} {
		if cut, is := strings.CutSuffix(digits, suffix); is {
			digits, factor = cut, times
		}
	}
	n, err := strconv.ParseUint(digits, 10, 64)
	switch {
	case s.Kind != config.KindText && s.Kind != config.KindNumber && s.Kind != config.KindDefault || !config.IsDigits(digits):
		return config.Wanted(s, want, "the units are k (thousand) and M (million): write for example "+f.Example)
	case err != nil || n == 0 || n > rateMax/factor:
		return config.Complain(fmt.Sprintf("%s %s is out of range, want 1 to 1000M", f.Name, s.Text), "")
	}
	r.Value = n * factor
	return nil
}

func (*rate) Schema(*config.Field) *jsonschema.Schema {
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "integer", Minimum: "1", Maximum: jsonNumber(rateMax)},
		{Type: "string", Pattern: `^[0-9]*[1-9][0-9]*[kM]?(/s)?$`},
	}}
}

func (*rate) Describe() string { return "number, with `k` or `M`" }

// account is a user or a group, by name or number.
type account struct {
	config.Mark
	Value string
}

func (a *account) Read(s config.Scalar, f *config.Field) *config.Complaint {
	switch n, err := strconv.ParseUint(s.Text, 10, 32); {
	case s.Kind == config.KindNumber && err != nil:
		return config.Wanted(s, "a name, or a number below 4294967295", "")
	case s.Kind == config.KindNumber && n == 1<<32-1:
		return config.Complain(s.Text+" is no user and no group: the kernel uses this number for \"none\"", "")
	case s.Kind != config.KindText && s.Kind != config.KindNumber:
		return config.Wanted(s, "a name or a number", "")
	case s.Text == "" || len(s.Text) > 63 || strings.ContainsAny(s.Text, " :\t\n"):
		return config.Complain(fmt.Sprintf("%q cannot be the name of a %s", s.Text, f.Name), "write for example "+f.Example)
	}
	a.Value = s.Text
	return nil
}

func (*account) Schema(*config.Field) *jsonschema.Schema {
	most, least := uint64(63), uint64(1)
	return &jsonschema.Schema{AnyOf: []*jsonschema.Schema{
		{Type: "integer", Minimum: "0", Maximum: jsonNumber(1<<32 - 2)},
		{Type: "string", MinLength: &least, MaxLength: &most},
	}}
}

func (*account) Describe() string { return "name or number" }
