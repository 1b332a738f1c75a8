package daemon

import (
	"cmp"
	"context"
	"maps"
	"slices"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/metrics"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/watch"
)

// now returns the present status, with the counters of all watches.
func (d *daemon) now() (watch.Status, shortcut.Counts, bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	st, err := d.status()
	all := maps.Clone(d.past)
	all.Add(st.Counts)
	return st, all, d.wanted.sameNode, err
}

// Status implements node.Instance. If pods cannot be judged, that is a condition, and no error here.
func (d *daemon) Status(_ context.Context, s *shuntv1.GetStatusResponse) error {
	st, all, sameNode, _ := d.now()
	s.Acceleration = &shuntv1.Acceleration{Mode: string(st.Mode), SameNode: sameNode, Pods: podsOf(&st), Counts: countsMessage(all), Uplinks: uplinksOf(&st), Networks: networksOf(&st), Steers: steersOf(&st)}
	d.mu.Lock()
	defer d.mu.Unlock()
	s.Acceleration.Sockets = d.pairs.message()
	return nil
}

// uplinksOf returns the interfaces towards other hosts.
func uplinksOf(st *watch.Status) (uplinks []*shuntv1.AcceleratedUplink) {
	for _, f := range st.Far {
		i := slices.IndexFunc(uplinks, func(m *shuntv1.AcceleratedUplink) bool { return m.Interface == f.Interface })
		switch {
		case f.Interface == "":
			continue
		case i < 0:
			i = len(uplinks)
			uplinks = append(uplinks, &shuntv1.AcceleratedUplink{Interface: f.Interface, Counts: countsMessage(st.From[f.Interface])})
		}
		uplinks[i].Attached = cmp.Or(uplinks[i].Attached, string(f.Attach))
		if !f.Network.IsValid() {
			uplinks[i].Why = f.Why
		}
	}
	return uplinks
}

// networksOf returns the networks of other hosts.
func networksOf(st *watch.Status) (networks []*shuntv1.AcceleratedNetwork) {
	for _, f := range st.Far {
		if !f.Network.IsValid() {
			continue
		}
		m := &shuntv1.AcceleratedNetwork{Network: f.Network.String(), Interface: f.Interface, State: f.State, Why: f.Why}
		if f.NextHop.IsValid() {
			m.NextHop = f.NextHop.String()
		}
		networks = append(networks, m)
	}
	return networks
}

// waysOf returns the number of networks beyond the uplinks that take the shortcut, and of all of
// them.
func waysOf(st *watch.Status) (took, of int) {
	for _, f := range st.Far {
		if f.Network.IsValid() && f.Interface != "" {
			of++
		}
		if f.State == shortcut.Taken.String() {
			took++
		}
	}
	return took, of
}

// podsOf returns the pods with their addresses.
func podsOf(st *watch.Status) (pods []*shuntv1.AcceleratedPod) {
	for _, p := range st.Pods {
		i := slices.IndexFunc(pods, func(m *shuntv1.AcceleratedPod) bool { return m.Interface == p.Interface })
		if i < 0 {
			i = len(pods)
			pods = append(pods, &shuntv1.AcceleratedPod{Interface: p.Interface, Attached: string(p.Attach), Counts: countsMessage(st.From[p.Interface])})
		}
		address := ""
		if p.Address.IsValid() {
			address = p.Address.String()
		}
		pods[i].Addresses = append(pods[i].Addresses, &shuntv1.AcceleratedAddress{Address: address, State: p.State, Why: p.Why})
	}
	return pods
}

// takes reports whether any address of a pod may take the shortcut.
func takes(p *shuntv1.AcceleratedPod) bool {
	return slices.ContainsFunc(p.Addresses, func(a *shuntv1.AcceleratedAddress) bool { return a.State == shortcut.Taken.String() })
}

func countsMessage(counts shortcut.Counts) map[string]*shuntv1.Count {
	all := map[string]*shuntv1.Count{}
	for name, n := range counts {
		all[name] = &shuntv1.Count{Packets: n.Packets, Bytes: n.Bytes}
	}
	return all
}

// Sample implements node.Sampler.
func (d *daemon) Sample(s *metrics.Sample) error {
	st, all, _, err := d.now()
	if err != nil {
		return err
	}
	s.Accelerates = true
	s.PodPackets, s.PodBytes = countsOf(all)
	states := map[string]uint64{}
	for _, p := range st.Pods {
		states[p.State]++
	}
	for _, state := range slices.Sorted(maps.Keys(states)) {
		s.PodAddresses = append(s.PodAddresses, metrics.Count{Of: state, Count: states[state]})
	}
	networks := map[string]uint64{}
	for _, f := range st.Far {
		if f.Network.IsValid() {
			networks[f.State]++
		}
	}
	for _, state := range slices.Sorted(maps.Keys(networks)) {
		s.PodNetworks = append(s.PodNetworks, metrics.Count{Of: state, Count: networks[state]})
	}
	for _, one := range st.Steers {
		packets, bytes := countsOf(one.Counts)
		s.Steers = append(s.Steers, metrics.Steer{Name: one.Name, State: one.State, Packets: packets, Bytes: bytes})
	}
	for _, iface := range slices.Sorted(maps.Keys(st.From)) {
		packets, bytes := countsOf(st.From[iface])
		s.Pods = append(s.Pods, metrics.Pod{Interface: iface, Packets: packets, Bytes: bytes})
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.pairs.sample(s)
}

func countsOf(counts shortcut.Counts) (packets, bytes []metrics.Count) {
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		packets = append(packets, metrics.Count{Of: name, Count: counts[name].Packets})
		bytes = append(bytes, metrics.Count{Of: name, Count: counts[name].Bytes})
	}
	return packets, bytes
}
