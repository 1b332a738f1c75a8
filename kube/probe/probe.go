// Package probe answers the probes of outer load balancers: at a Service's healthCheckNodePort it answers whether the
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

// headerTimeout is the time that a prober may take for its request.
const headerTimeout = 5 * time.Second

// Server answers at a set of ports, at all addresses of the network namespace that it is made in. Its methods
// are safe for concurrent use.
type Server struct {
	well func() bool

	mutex sync.Mutex
	ports map[uint16]*port
}

// port is a port with answers.
type port struct {
	server  *http.Server
	service translate.Key
	local   int
}

// New returns a server that answers nothing yet. well reports whether the last statement about endpoints is in force on
// this node; if it is not, every probe is answered with 503.
func New(well func() bool) *Server { return &Server{well: well, ports: map[uint16]*port{}} }

// Answer sets the answers, and returns a fault for each port that cannot be opened; the next call tries these again.
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

// answer is the body, in kube-proxy's form (pkg/proxy/healthcheck/service_health.go), because outer load balancers may read it.
type answer struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints      int  `json:"localEndpoints"`
	ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
}

// weightHeader is the header in which kube-proxy also sends the number of endpoints.
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
		_ = json.NewEncoder(w).Encode(body) // an error means that the prober has gone
	}
}
