package source

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/message"
	"github.com/shunt-lb/shunt/kube/translate"
)

// standing is the agent's state from Follow.
type standing struct {
	inStep  time.Time // since when the node is in step; zero: it is not
	refused string    // why it is not
	changed time.Time // when a change was last brought into force

	alone     map[translate.Key]bool                     // Services for other proxies
	announced map[translate.Key][]translate.Announcement // by Service that has some
	otherwise bool                                       // announced has changed since addresses was made
	addresses []*shuntv1.ClusterAddress                  // never changed after it was made; nor are the faults
	faults    []*shuntv1.ClusterFault
}

func newStanding() standing {
	return standing{alone: map[translate.Key]bool{}, announced: map[translate.Key][]translate.Announcement{}}
}

// declared records the end of a step.
func (s *standing) declared(err error, worked bool) {
	switch {
	case err != nil:
		s.inStep, s.refused = time.Time{}, message.Text(err.Error())
		return
	case s.inStep.IsZero():
		s.inStep, s.refused = time.Now(), ""
	}
	if worked {
		s.changed = time.Now()
	}
}

// Status returns the agent's view of the cluster as of the last step. It is for any goroutine.
func (s *Source) Status() *shuntv1.Cluster {
	c := proto.CloneOf(s.published.Load())
	if contact := s.options.Contact; contact != nil {
		away, why := contact.State()
		c.Apiserver, c.ApiserverError, c.ApiserverAwaySince = contact.Server, why, message.Time(away)
	}
	return c
}

// publish updates Status. It costs little while faults and announced addresses stay.
func (s *Source) publish() {
	if s.stale {
		s.standing.faults = s.listFaults()
	}
	if s.standing.otherwise {
		s.standing.addresses, s.standing.otherwise = s.standing.list(), false
	}
	node, now := &s.translator.Node, &s.standing
	whole, part, none := s.set.Count()
	s.published.Store(&shuntv1.Cluster{
		Node: node.Name, NodeAddresses: texts(node.Addresses), Zone: node.Zone, PodNetworks: texts(node.Pods),
		InStepSince: message.Time(now.inStep), Refused: now.refused, Changed: message.Time(now.changed), Faults: now.faults, Announced: now.addresses,
		Services: &shuntv1.ClusterServices{Served: uint64(whole), InPart: uint64(part), Unserved: uint64(none), LeftAlone: uint64(len(now.alone))},
	})
}

func (s *Source) listFaults() (all []*shuntv1.ClusterFault) {
	for _, f := range s.allFaults() {
		since := s.said[f]
		if f.Code == translate.EndpointsMissing {
			since = s.lacking.since[strings.TrimPrefix(f.Object, "Service ")]
		}
		all = append(all, &shuntv1.ClusterFault{Code: string(f.Code), Object: f.Object, Text: f.Text, Remedy: f.Remedy, Since: message.Time(since)})
	}
	return all
}

// list returns the addresses that nodes should announce, each once, sorted by address.
func (s *standing) list() (all []*shuntv1.ClusterAddress) {
	at := map[netip.Addr]*shuntv1.ClusterAddress{}
	for key, announced := range s.announced {
		for _, a := range announced {
			if at[a.Address] == nil {
				at[a.Address] = &shuntv1.ClusterAddress{Address: a.Address.String(), Node: a.Node}
			}
			at[a.Address].Here = at[a.Address].Here || a.Here
			at[a.Address].Services = append(at[a.Address].Services, key)
		}
	}
	for _, a := range slices.SortedFunc(maps.Keys(at), netip.Addr.Compare) {
		slices.Sort(at[a].Services)
		all = append(all, at[a])
	}
	return all
}

// note records a Service's translation.
func (s *standing) note(key translate.Key, exists bool, t translate.Translation) {
	if delete(s.alone, key); exists && len(t.Services)+len(t.Faults) == 0 {
		s.alone[key] = true
	}
	if slices.Equal(s.announced[key], t.Announced) {
		return
	}
	if s.otherwise = true; len(t.Announced) == 0 {
		delete(s.announced, key)
	} else {
		s.announced[key] = t.Announced
	}
}

// texts returns things as text.
func texts[T interface{ String() string }](list []T) (all []string) {
	for _, x := range list {
		all = append(all, x.String())
	}
	return all
}
