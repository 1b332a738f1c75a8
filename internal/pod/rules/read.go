// Package rules reads the host's netfilter rules and finds rules that may act on a packet which
// the shortcut would keep from them.
//
// It decodes rules itself: a library that leaves out the expressions it does not know would make a rule look
// harmless. An expression that this package does not know is a reason to leave the pod alone.
package rules

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// expression is one step of a rule: its name in nf_tables, and its attributes.
type expression struct {
	name       string
	attributes map[uint16][]byte
}

func (e *expression) number(attribute uint16) (n uint32, ok bool) {
	b, ok := e.attributes[attribute]
	if !ok || len(b) < 4 {
		return 0, false
	}
	return binary.BigEndian.Uint32(b), true
}

// rule is a line of a chain.
type rule struct {
	handle      uint64
	expressions []expression
}

// chain is a list of rules; a hook calls base chains.
type chain struct {
	family   uint8
	table    string
	name     string
	base     bool
	hook     uint32
	priority int32
	kind     string // filter, route or nat
	drops    bool   // the policy
	devices  []string
	rules    []rule
}

func (c *chain) String() string {
	return fmt.Sprintf("%s %s %s", familyWord(c.family), c.table, c.name)
}

func familyWord(family uint8) string {
	words := map[uint8]string{
		unix.NFPROTO_INET: "inet", unix.NFPROTO_IPV4: "ip", unix.NFPROTO_IPV6: "ip6", unix.NFPROTO_NETDEV: "netdev",
		unix.NFPROTO_BRIDGE: "bridge", unix.NFPROTO_ARP: "arp",
	}
	if word, ok := words[family]; ok {
		return word
	}
	return fmt.Sprintf("family %d", family)
}

type chainKey struct {
	family      uint8
	table, name string
}

// Set has all rules of a network namespace at one moment.
type Set struct {
	chains map[chainKey]*chain
	bases  []*chain
	legacy []legacyTable
	beside beside
}

// Read reads the rules of the calling thread's network namespace. Rules that change meanwhile are read again.
func Read() (*Set, error) {
	const tries = 20 // a change interrupts each, so the last one announces another reading
	for try := 1; ; try++ {
		s, err := read()
		if errors.Is(err, netlink.ErrDumpInterrupted) && try < tries {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read the netfilter rules: %w", err)
		}
		return s, nil
	}
}

func read() (*Set, error) {
	s := &Set{chains: map[chainKey]*chain{}}
	err := dump(unix.NFT_MSG_GETCHAIN, unix.NFT_MSG_NEWCHAIN, s.addChain)
	if err == nil {
		err = dump(unix.NFT_MSG_GETRULE, unix.NFT_MSG_NEWRULE, s.addRule)
	}
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EPROTONOSUPPORT) { // no nf_tables in this kernel, or not loaded
		err = nil
	}
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(s.bases, func(a, b *chain) int {
		return cmp.Or(cmp.Compare(order(a.hook), order(b.hook)), cmp.Compare(a.priority, b.priority))
	})
	return s, s.readUntold()
}

// order returns the position of a hook in the path of a forwarded packet.
func order(hook uint32) int {
	return slices.Index([]uint32{hookIngress, hookPrerouting, hookForward, hookPostrouting}, hook)
}

// Refresh reads the parts again whose changes nf_tables does not announce: iptables-legacy, IPVS, the policies of IPsec.
func (s *Set) Refresh() error {
	if err := s.readUntold(); err != nil {
		return fmt.Errorf("read the netfilter rules: %w", err)
	}
	return nil
}

func (s *Set) readUntold() (err error) {
	if s.legacy, err = readLegacy(); err == nil {
		s.beside, err = readBeside()
	}
	return err
}

// dump asks nf_tables for all objects of one kind, of all families.
func dump(ask, answer uint16, add func(family uint8, attributes map[uint16][]byte) error) error {
	request := nl.NewNetlinkRequest(int(unix.NFNL_SUBSYS_NFTABLES<<8|ask), unix.NLM_F_DUMP)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	messages, err := request.Execute(unix.NETLINK_NETFILTER, unix.NFNL_SUBSYS_NFTABLES<<8|answer)
	if err != nil {
		return err
	}
	for _, m := range messages {
		if len(m) < nl.SizeofNfgenmsg {
			return errors.New("nf_tables gave an answer that shunt does not understand")
		}
		attributes, err := parse(m[nl.SizeofNfgenmsg:])
		if err != nil {
			return err
		}
		if err := add(m[0], attributes); err != nil {
			return err
		}
	}
	return nil
}

// parse reads attributes; if several have one number, the last counts.
func parse(b []byte) (map[uint16][]byte, error) {
	list, err := nl.ParseRouteAttr(b)
	if err != nil {
		return nil, fmt.Errorf("nf_tables gave attributes that shunt does not understand: %w", err)
	}
	attributes := map[uint16][]byte{}
	for _, a := range list {
		attributes[a.Attr.Type&nl.NLA_TYPE_MASK] = a.Value
	}
	return attributes, nil
}

func text(b []byte) string {
	s, _, _ := strings.Cut(string(b), "\x00")
	return s
}

func (s *Set) addChain(family uint8, attributes map[uint16][]byte) error {
	c := &chain{family: family, table: text(attributes[unix.NFTA_CHAIN_TABLE]), name: text(attributes[unix.NFTA_CHAIN_NAME]), kind: text(attributes[unix.NFTA_CHAIN_TYPE])}
	s.chains[chainKey{family, c.table, c.name}] = c
	nested, based := attributes[unix.NFTA_CHAIN_HOOK]
	if !based {
		return nil
	}
	hook, err := parse(nested)
	if err != nil {
		return err
	}
	numbers := expression{attributes: hook}
	c.base = true
	c.hook, _ = numbers.number(unix.NFTA_HOOK_HOOKNUM)
	priority, _ := numbers.number(unix.NFTA_HOOK_PRIORITY)
	c.priority = int32(priority)
	if policy := attributes[unix.NFTA_CHAIN_POLICY]; len(policy) == 4 {
		c.drops = binary.BigEndian.Uint32(policy) != netfilterAccept
	}
	const hookDevices = 4 // NFTA_HOOK_DEVS
	if device, one := hook[unix.NFTA_HOOK_DEV]; one {
		c.devices = append(c.devices, text(device))
	}
	list, err := nl.ParseRouteAttr(hook[hookDevices])
	for _, device := range list {
		c.devices = append(c.devices, text(device.Value))
	}
	s.bases = append(s.bases, c)
	return err
}

func (s *Set) addRule(family uint8, attributes map[uint16][]byte) error {
	key := chainKey{family, text(attributes[unix.NFTA_RULE_TABLE]), text(attributes[unix.NFTA_RULE_CHAIN])}
	c := s.chains[key]
	if c == nil { // made after the chains were read
		return netlink.ErrDumpInterrupted
	}
	r := rule{}
	if handle := attributes[unix.NFTA_RULE_HANDLE]; len(handle) == 8 {
		r.handle = binary.BigEndian.Uint64(handle)
	}
	list, err := nl.ParseRouteAttr(attributes[unix.NFTA_RULE_EXPRESSIONS])
	if err != nil {
		return err
	}
	for _, element := range list {
		parts, err := parse(element.Value)
		if err != nil {
			return err
		}
		e := expression{name: text(parts[unix.NFTA_EXPR_NAME])}
		if e.attributes, err = parse(parts[unix.NFTA_EXPR_DATA]); err != nil {
			return err
		}
		r.expressions = append(r.expressions, e)
	}
	c.rules = append(c.rules, r)
	return nil
}
