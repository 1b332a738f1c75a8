package metrics

// podFamilies are present while the pod shortcut runs.
var podFamilies = []Family{
	{"shunt_accelerate_addresses", Gauge, []string{"state"}, "Addresses of pods, by state: taken, or why all their packets are left to the host's stack.",
		func(e *exposition, s *Sample) { counts(e, "state", s.PodAddresses) }},
	{"shunt_accelerate_networks", Gauge, []string{"state"}, "Networks of other hosts, and parts of them that have a route of their own, by state: taken, or why they are left to the host's stack.",
		func(e *exposition, s *Sample) { counts(e, "state", s.PodNetworks) }},
	{"shunt_accelerate_packets_total", Counter, []string{"reason"}, "Packets that pods sent, and packets for pods that came in by uplinks. taken: they took the shortcut. Otherwise they went through the host's stack, for that reason.",
		func(e *exposition, s *Sample) { counts(e, "reason", s.PodPackets) }},
	{"shunt_accelerate_bytes_total", Counter, []string{"reason"}, "Bytes of the packets of shunt_accelerate_packets_total.",
		func(e *exposition, s *Sample) { counts(e, "reason", s.PodBytes) }},
	{"shunt_accelerate_pod_packets_total", Counter, []string{"interface", "reason"}, "Packets that came from the pod behind an interface, or by an uplink for pods, as in shunt_accelerate_packets_total.",
		pods(func(p *Pod) []Count { return p.Packets })},
	{"shunt_accelerate_pod_bytes_total", Counter, []string{"interface", "reason"}, "Bytes of the packets of shunt_accelerate_pod_packets_total.",
		pods(func(p *Pod) []Count { return p.Bytes })},
	{"shunt_accelerate_steer_up", Gauge, []string{"steer"}, "1: packets go through the interface of the entry of steer. 0: they follow the host's routes.",
		func(e *exposition, s *Sample) {
			for i := range s.Steers {
				up := uint64(0)
				if s.Steers[i].State == "taken" {
					up = 1
				}
				e.whole(labels("steer", s.Steers[i].Name), up)
			}
		}},
	{"shunt_accelerate_steer_packets_total", Counter, []string{"steer", "reason"}, "Packets that match an entry of steer, with their answers. taken: they went through its interface. Otherwise they went as if there were no such entry, for that reason.",
		steers(func(s *Steer) []Count { return s.Packets })},
	{"shunt_accelerate_steer_bytes_total", Counter, []string{"steer", "reason"}, "Bytes of the packets of shunt_accelerate_steer_packets_total.",
		steers(func(s *Steer) []Count { return s.Bytes })},
}

// socketFamilies are present while accelerate's sockets are in the file.
var socketFamilies = []Family{
	{"shunt_accelerate_sockets", Gauge, nil, "Sockets that are paired now.",
		func(e *exposition, s *Sample) { e.whole("", s.SocketsPaired) }},
	{"shunt_accelerate_socket_messages_total", Counter, []string{"reason"}, "Messages that paired sockets have sent. taken: straight to the other socket. Otherwise they went by TCP, for that reason.",
		func(e *exposition, s *Sample) { counts(e, "reason", s.SocketMessages) }},
	{"shunt_accelerate_socket_bytes_total", Counter, []string{"reason"}, "Bytes of the messages of shunt_accelerate_socket_messages_total.",
		func(e *exposition, s *Sample) { counts(e, "reason", s.SocketBytes) }},
	{"shunt_accelerate_socket_connections_total", Counter, []string{"outcome"}, "Connections of the chosen cgroups. joined: both ends were paired. Otherwise they were left alone, for that reason.",
		func(e *exposition, s *Sample) { counts(e, "outcome", s.SocketConnections) }},
}

// Steer is an entry of the pod shortcut's key steer.
type Steer struct {
	Name, State    string
	Packets, Bytes []Count // by reason
}

// steers writes counts of each steer.
func steers(of func(s *Steer) []Count) func(*exposition, *Sample) {
	return func(e *exposition, s *Sample) {
		for i := range s.Steers {
			for _, c := range of(&s.Steers[i]) {
				e.whole(labels("steer", s.Steers[i].Name, "reason", c.Of), c.Count)
			}
		}
	}
}

// Pod is a pod that the pod shortcut knows, by the host's end of its veth.
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
