package ping

import (
	"slices"
	"strings"
)

// The points that a probe can pass, in their order. The points of a host are on its own clock.
const (
	clientSent = iota
	clientQueue
	clientDriver
	balancerTook // a balancer's program had the probe
	balancerDone // and has returned its verdict
	serverReceive
	serverSoftirq
	serverSocket // of UDP, like the next two: the kernel answers ICMP
	serverWoken
	serverUser
	serverQueue
	serverDriver
	balancerTookAnswer
	balancerDoneAnswer
	clientReceive
	clientSoftirq
	clientSocket
	clientWoken
	clientUser
	pointCount
)

// pointNames name the places where a lost probe was seen last.
var pointNames = [pointCount]string{
	"client sent", "client queue", "client driver", "balancer", "balancer verdict",
	"server receive", "server softirq", "server socket", "server wake-up", "server user", "server queue", "server driver",
	"balancer, of the answer", "balancer verdict, of the answer",
	"client receive", "client softirq", "client socket", "client wake-up", "client user",
}

// stageKind is a stage that a probe can pass. Its name has the host and the activity.
type stageKind struct {
	name, color string
	isPlain     bool // also a stage of ICMP without a balancer
}

// stages has all stages, in an order that every path keeps. Colours of neighbours differ in brightness too, for people who do not distinguish
// colours.
var stages = []stageKind{
	{"client.send", "#4477aa", true},      // the system call, up to the queueing discipline
	{"client.queue", "#66ccee", true},     // the queueing discipline
	{"wire.out", "#228833", true},         // the client's driver, and everything between the hosts, or before a balancer
	{"balancer.out", "#cc0000", false},    // the balancer's program has the probe
	{"balancer.answer", "#990000", false}, // it has the probe, and answers it itself
	{"wire.on", "#55aa88", false},         // from the balancer to the server
	{"server.receive", "#ccbb44", true},   // from the driver to the softirq that takes the packet
	{"server.protocol", "#005577", false}, // of UDP: the softirq, up to the socket
	{"server.wakeup", "#99ddaa", false},   // of UDP, as the client's
	{"server.user", "#553377", false},     // likewise
	{"server.answer", "#ee6677", true},    // the softirq, in which the kernel makes the answer
	{"server.send", "#ffcc99", false},     // of UDP, as the client's
	{"server.queue", "#aa3377", true},     // the queueing discipline
	{"wire.return", "#337755", false},     // from the server to the balancer
	{"balancer.back", "#ff6666", false},   // the balancer's program has the answer
	{"wire.back", "#88cc55", true},        // the server's driver, and everything between the hosts, or after a balancer with NAT
	{"client.receive", "#bbbbbb", true},   // from the driver to the softirq
	{"client.protocol", "#332288", true},  // the softirq, up to the socket
	{"client.wakeup", "#ff9933", true},    // from the socket until the process is put on a run queue
	{"client.user", "#775533", true},      // until it has the message: the time in the run queue, and the system call
}

// stageAt returns the index of a stage in stages, or of the first one of a joint name.
func stageAt(name string) int {
	first, _, _ := strings.Cut(name, "+")
	return slices.IndexFunc(stages, func(k stageKind) bool { return k.name == first })
}

// via is a balancer's treatment of a probe, as far as its stamps show.
type via int

const (
	viaNone     via = iota
	viaOut          // it saw only the probe: the answer goes straight to the client
	viaBoth         // and the answer
	viaAnswered     // it answered the probe itself
	viaCount
)

// path is the path of a probe: between has the names of the stages between two of its points; "" if a point is not on it.
type path struct {
	between [pointCount][pointCount]string
}

// paths has all paths, by whether the probe is of UDP.
var paths = func() (all [2][viaCount]path) {
	for udp := range all {
		for v := range viaCount {
			all[udp][v] = newPath(udp == 1, v)
		}
	}
	return all
}()

func newPath(udp bool, v via) (p path) {
	type step struct {
		stage string // the stage that ends at the point
		point int
	}
	var steps []step
	add := func(stage string, point int) { steps = append(steps, step{stage, point}) }
	add("", clientSent)
	add("client.send", clientQueue)
	add("client.queue", clientDriver)
	onward, homeward := "wire.out", "wire.back"
	if v != viaNone {
		add("wire.out", balancerTook)
		add("balancer.out", balancerDone)
		onward = "wire.on"
	}
	if v == viaAnswered {
		steps[len(steps)-1].stage = "balancer.answer"
	} else {
		if v == viaBoth {
			homeward = "wire.return"
		}
		add(onward, serverReceive)
		add("server.receive", serverSoftirq)
		answer := "server.answer"
		if udp {
			add("server.protocol", serverSocket)
			add("server.wakeup", serverWoken)
			add("server.user", serverUser)
			answer = "server.send"
		}
		add(answer, serverQueue)
		add("server.queue", serverDriver)
		if v == viaBoth {
			add(homeward, balancerTookAnswer)
			add("balancer.back", balancerDoneAnswer)
			homeward = "wire.back"
		}
	}
	add(homeward, clientReceive)
	add("client.receive", clientSoftirq)
	add("client.protocol", clientSocket)
	add("client.wakeup", clientWoken)
	add("client.user", clientUser)
	for i, from := range steps {
		var names []string
		for _, to := range steps[i+1:] {
			names = append(names, to.stage)
			p.between[from.point][to.point] = strings.Join(names, "+")
		}
	}
	return p
}
