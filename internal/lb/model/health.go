package model

import (
	"fmt"
	"strconv"
	"time"
)

// HealthState is the known state of a backend in a service. The value is the word used in output.
type HealthState string

// The states.
const (
	HealthUp   HealthState = "up"
	HealthDown HealthState = "down"
	// HealthWaiting is the state of a backend that has not passed a check since it became known.
	HealthWaiting HealthState = "waiting"
)

// HealthCheck is a kind of check. The value is the word used in configuration and output.
type HealthCheck string

// The kinds of checks.
const (
	CheckTCP   HealthCheck = "tcp"   // a connection is accepted
	CheckHTTP  HealthCheck = "http"  // a request is answered as expected
	CheckHTTPS HealthCheck = "https" // the same over TLS
	CheckGRPC  HealthCheck = "grpc"  // grpc.health.v1 says SERVING
	CheckUDP   HealthCheck = "udp"   // a datagram is answered
	CheckExec  HealthCheck = "exec"  // a program exits with 0
)

// Health says how a service's backends are checked, and how results count. Without a Check all backends count
// as up.
type Health struct {
	Check HealthCheck
	Port  uint16 // host byte order; 0: the backend's port, or else the only port of the service

	Interval time.Duration // from one check of a backend to the next
	Timeout  time.Duration // of one check, at most Interval
	Rise     uint32        // successes in a row after which a backend that is down is up
	Fall     uint32        // failures in a row after which it is down
	Jitter   uint32        // random part of intervals, in percent either way

	// SlowStart is the time in which a backend that was down, or joins others, reaches its full weight; 0: at
	// once.
	SlowStart time.Duration
	// Panic is the percentage of a service's backends below which health is not believed: all
	// of them take flows. 0: health is always believed.
	Panic uint32

	HTTP HealthHTTP // CheckHTTP and CheckHTTPS
	TLS  HealthTLS  // CheckHTTPS
	GRPC HealthGRPC // CheckGRPC
	UDP  HealthUDP  // CheckUDP
	Exec []string   // CheckExec: program and arguments
}

// HealthHTTP is a request and the expected answer.
type HealthHTTP struct {
	Path     string // with the query
	Host     string // "": address and port
	Statuses []StatusRange
	Body     string // has to be in the body; "": anything
}

// StatusRange is an inclusive range of HTTP statuses.
type StatusRange struct{ First, Last uint16 }

// HealthTLS says how a backend's certificate is verified.
type HealthTLS struct {
	ServerName string // for SNI and the certificate; "": the name in HealthHTTP.Host, or else the address
	NoVerify   bool
	CAFile     string // PEM; "": the machine's authorities
}

// HealthGRPC is the question of a check with grpc.health.v1.
type HealthGRPC struct{ Service string } // "": the server as a whole

// HealthUDP is a datagram and the expected answer.
type HealthUDP struct {
	Send   string // any bytes
	Expect string // have to be in the answer; "": any answer
	// SilencePasses makes no answer count as a success, as long as no ICMP error refuses the datagram.
	SilencePasses bool
}

// String returns the range as the configuration writes it.
func (r StatusRange) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}
