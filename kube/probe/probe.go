// Package probe answers the probes of outer load balancers: at a Service's healthCheckNodePort, whether the
// Service has endpoints on this node that take connections.
//
//	outer load balancer ── GET any path ──► :healthCheckNodePort ──► 200: there are some; 503: there are none
package probe

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/kube/translate"
)

// headerTimeout is how long a prober may take for its request.
const headerTimeout = 5 * time.Second

// Server answers at a set of ports, at all addresses of the network namespace that it is made in. Its methods
// are safe for concurrent use.
type Server struct {
	well func() bool

	mutex sync.Mutex
	ports map[uint16]*port
}

// port is one that is answered.
type port struct {
	server  *http.Server
	service translate.Key
	local   int
}

// New is a server that answers nothing yet. well reports whether what was last said of endpoints is in force on
// this node; where it is not, every probe is answered with 503.
func New(well func() bool) *Server { return &Server{well: well, ports: map[uint16]*port{}} }

// Answer makes these what is answered, and returns a fault for each that cannot be; those are tried again with the next call.
func (s *Server) Answer(services map[translate.Key]translate.Health) (faults []translate.Fault) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	wanted := map[uint16]bool{}
	for _, h := range services {
		wanted[h.Port] = true
	}
	for number, p := range s.ports {
		if !wanted[number] {
			_ = p.server.Close() // a probe that is under way fails, as the next one will
			delete(s.ports, number)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(services)) {
		h := services[key]
		p := s.ports[h.Port]
		if p == nil {
			var err error
			if p, err = s.listen(h.Port); err != nil {
				faults = append(faults, translate.Fault{Code: translate.HealthPortUnserved, Object: "Service " + key,
					Text:   fmt.Sprintf("healthCheckNodePort %d is not answered: %v", h.Port, err),
					Remedy: "end the program that has the port (`ss -ltnp`), which may be a kube-proxy; shunt-kube tries again each minute"})
				continue
			}
			s.ports[h.Port] = p
		}
		p.service, p.local = key, h.Local
	}
	return faults
}

// Close ends all answers.
func (s *Server) Close() { s.Answer(nil) }

func (s *Server) listen(number uint16) (*port, error) {
	listener, err := new(net.ListenConfig).Listen(context.Background(), "tcp", ":"+strconv.Itoa(int(number)))
	if err != nil {
		return nil, err
	}
	p := &port{}
	p.server = &http.Server{Handler: s.handler(p), ReadHeaderTimeout: headerTimeout}
	go func() { _ = p.server.Serve(listener) }() // ends with Close
	return p, nil
}

// answer is the body, whose form is kube-proxy's (pkg/proxy/healthcheck/service_health.go): outer load balancers may read it.
type answer struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints      int  `json:"localEndpoints"`
	ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
}

// weightHeader is where kube-proxy says how many endpoints there are, too.
const weightHeader = "X-Load-Balancing-Endpoint-Weight"

func (s *Server) handler(p *port) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		var body answer
		s.mutex.Lock()
		body.Service.Namespace, body.Service.Name, _ = strings.Cut(p.service, "/")
		body.LocalEndpoints = p.local
		s.mutex.Unlock()
		body.ServiceProxyHealthy = s.well()
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set(weightHeader, strconv.Itoa(body.LocalEndpoints))
		if body.LocalEndpoints == 0 || !body.ServiceProxyHealthy {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_ = json.NewEncoder(w).Encode(body) // a prober that has gone hears nothing
	}
}
