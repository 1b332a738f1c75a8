package connect

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// Attempt is an operation that rules forbid to the program that has tried it.
type Attempt struct {
	Time      time.Time `json:"time"`
	Denied    bool      `json:"denied"` // otherwise it was only audited
	Operation string    `json:"operation"`
	Address   string    `json:"address,omitempty"` // with its port; empty: not known yet
	Protocol  string    `json:"protocol"`
	Rules     []string  `json:"rules"`
	PID       uint32    `json:"pid"`
	Comm      string    `json:"comm"`
	Program   string    `json:"program"`
	CgroupID  uint64    `json:"cgroup"`
	Netns     uint32    `json:"netns"`
}

// String returns the attempt as one line.
func (a Attempt) String() string {
	word := "audited"
	if a.Denied {
		word = "denied"
	}
	object := a.Protocol
	if a.Address != "" {
		object = a.Address + " (" + a.Protocol + ")"
	}
	return fmt.Sprintf("%s %s %s of %s by %s (pid %d, %s): rule %s", a.Time.Format("15:04:05.000"), word, a.Operation, object, event.Printable(a.Program), a.PID,
		event.Printable(a.Comm), strings.Join(a.Rules, ", "))
}

// protocols by their numbers (IPPROTO_* of linux/in.h).
var protocols = map[uint16]string{1: "ICMP", 6: "TCP", 17: "UDP", 33: "DCCP", 58: "ICMPv6", 132: "SCTP", 136: "UDP-Lite", 262: "MPTCP"}

func attemptOf(e event.Event, rules []policy.Connection) (Attempt, error) {
	var raw connectConnectEvent
	if err := binary.Read(bytes.NewReader(e.Payload), binary.NativeEndian, &raw); err != nil {
		return Attempt{}, fmt.Errorf("decode an attempt to connect of %d bytes: %w; the programs are of another version of shunt", len(e.Payload), err)
	}
	a := Attempt{Time: event.Time(e.TimeNs), Denied: raw.IsDenied != 0, Operation: wordOf(connectConnectOp(raw.Op)), Protocol: protocols[raw.Protocol],
		PID: e.Tgid, Comm: event.Text(raw.Comm[:]), CgroupID: e.CgroupID, Netns: e.Netns, Program: "the kernel"}
	if a.Protocol == "" {
		a.Protocol = fmt.Sprintf("protocol %d", raw.Protocol)
	}
	if a.Operation == policy.Raw {
		a.Protocol = "a raw socket"
	}
	if connectConnectAddressKind(raw.AddressKind) != connectConnectAddressKindCONNECT_UNKNOWN {
		a.Address = netip.AddrPortFrom(addressFrom(raw.Address), raw.Port).String()
	}
	for i, r := range rules {
		if raw.Rules>>i&1 == 1 {
			a.Rules = append(a.Rules, r.Name)
		}
	}
	if raw.Program != (connectGuardFile{}) {
		a.Program = event.Path(raw.ProgramNames[:min(int(raw.ProgramSize), len(raw.ProgramNames))])
	}
	return a, nil
}
