package metrics

// podFamilies are there while the pod shortcut runs.
var podFamilies = []Family{
	{"shunt_accelerate_addresses", Gauge, []string{"state"}, "Addresses of pods, by state: taken, or why all their packets are left to the host's stack.",
		func(e *exposition, s *Sample) { counts(e, "state", s.PodAddresses) }},
	{"shunt_accelerate_networks", Gauge, []string{"state"}, "Networks of other hosts, and parts of them that have a way of their own, by state: taken, or why they are left to the host's stack.",
		func(e *exposition, s *Sample) { counts(e, "state", s.PodNetworks) }},
	{"shunt_accelerate_packets_total", Counter, []string{"reason"}, "Packets that pods have sent, and that came for them by uplinks. taken: they took the shortcut. Otherwise they went through the host's stack, for that reason.",
		func(e *exposition, s *Sample) { counts(e, "reason", s.PodPackets) }},
	{"shunt_accelerate_bytes_total", Counter, []string{"reason"}, "Bytes of the packets of shunt_accelerate_packets_total.",
		func(e *exposition, s *Sample) { counts(e, "reason", s.PodBytes) }},
	{"shunt_accelerate_pod_packets_total", Counter, []string{"interface", "reason"}, "Packets that came from the pod behind an interface, or by an uplink for pods, as in shunt_accelerate_packets_total.",
		pods(func(p *Pod) []Count { return p.Packets })},
	{"shunt_accelerate_pod_bytes_total", Counter, []string{"interface", "reason"}, "Bytes of the packets of shunt_accelerate_pod_packets_total.",
		pods(func(p *Pod) []Count { return p.Bytes })},
}

// Pod is one that the pod shortcut knows, by the host's end of its veth.
type Pod struct {
	Interface      string
	Packets, Bytes []Count // by reason
}

// pods writes counts of each pod.
func pods(of func(p *Pod) []Count) func(*exposition, *Sample) {
	return func(e *exposition, s *Sample) {
		for i := range s.Pods {
			for _, c := range of(&s.Pods[i]) {
				e.whole(labels("interface", s.Pods[i].Interface, "reason", c.Of), c.Count)
			}
		}
	}
}
