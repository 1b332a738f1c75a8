package ping

import "strings"

// The points that a probe can pass, in their order. Those of a host are on its own clock.
const (
	clientSent = iota
	clientQueue
	clientDriver
	balancerTook // a balancer's program had the probe
	balancerDone // and its verdict
	serverReceive
	serverSoftirq
	serverSocket // of UDP, as the next two: of ICMP the kernel answers
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

// pointNames say where a lost probe was seen last.
var pointNames = [pointCount]string{
	"client sent", "client queue", "client driver", "balancer", "balancer verdict",
	"server receive", "server softirq", "server socket", "server wake-up", "server user", "server queue", "server driver",
	"balancer, of the answer", "balancer verdict, of the answer",
	"client receive", "client softirq", "client socket", "client wake-up", "client user",
}

// stageNames are the stages of a probe of ICMP without a balancer, in the order in which a probe passes them; each is named by its
// host and by what happens in it.
var stageNames = []string{
	"client.send",     // the system call, up to the queueing discipline
	"client.queue",    // the queueing discipline
	"wire.out",        // the client's driver, and all that is between the hosts
	"server.receive",  // from the driver to the softirq that takes the packet
	"server.answer",   // the softirq, in which the kernel makes the answer
	"server.queue",    // the queueing discipline
	"wire.back",       // the server's driver, and all that is between the hosts
	"client.receive",  // from the driver to the softirq
	"client.protocol", // the softirq, up to the socket
	"client.wakeup",   // from the socket until the process is put on a run queue
	"client.user",     // until it has the message: the time in the run queue, and the system call
}

// stagesOnlyBalancer and stagesOnlyUDP are the other stages.
var (
	stagesOnlyUDP = []string{
		"server.protocol", // the softirq, up to the socket
		"server.wakeup",   // as the client's
		"server.user",     // likewise
		"server.send",     // as the client's
	}
	stagesOnlyBalancer = []string{
		"balancer.out",    // the balancer's program has the probe; with a balancer, wire.out ends before it
		"balancer.answer", // it has the probe, and answers it itself
		"wire.on",         // from the balancer to the server
		"wire.return",     // from the server to the balancer
		"balancer.back",   // the balancer's program has the answer; with NAT, wire.back begins after it
	}
)

// allStages are all stages in an order that every path keeps.
var allStages = []string{
	"client.send", "client.queue", "wire.out", "balancer.out", "balancer.answer", "wire.on",
	"server.receive", "server.protocol", "server.wakeup", "server.user", "server.answer", "server.send", "server.queue",
	"wire.return", "balancer.back", "wire.back", "client.receive", "client.protocol", "client.wakeup", "client.user",
}

// via tells how a balancer dealt with a probe, as far as its stamps say.
type via int

const (
	viaNone     via = iota
	viaOut          // it saw the probe alone: the answer goes straight to the client
	viaBoth         // and the answer
	viaAnswered     // it answered the probe itself
	viaCount
)

// path is the way of a probe: between has the names of the stages between two of its points; "" where one is not on it.
type path struct {
	between [pointCount][pointCount]string
}

// paths are all, by whether the probe is of UDP.
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
		stage string // that ends at the point
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
