package metrics

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/common/expfmt"
)

const (
	// path is the usual path of metrics.
	path = "/metrics"
	// contentType is the type of the text format (prometheus.io/docs/instrumenting/exposition_formats).
	contentType = "text/plain; version=0.0.4; charset=utf-8"

	headerTimeout = 5 * time.Second
	// defaultPatience: Prometheus gives up after 10 s itself, unless told otherwise.
	defaultPatience = 10 * time.Second
	headerBytesMax  = 16 << 10
	// connectionsMax bounds descriptors. None stays open after its answer.
	connectionsMax = 64
	// scrapesMax bounds memory: an answer may have tens of megabytes. Two Prometheus servers
	// that back each other may scrape at the same moment.
	scrapesMax = 2
)

// Server answers scrapes at one address at a time, or at none. Prepare and Close are for one caller at
// a time.
type Server struct {
	Setting string // that names the address, in messages; empty: metrics.listen

	sample  func() (*Sample, error)
	log     *slog.Logger
	process *prometheus.Registry // of this process: memory, CPU time, goroutines; and the program's own metrics beside the node's
	turns   chan struct{}        // each scrape holds one
	size    atomic.Int64         // of the last answer
	// patience bounds a scrape's wait for its turn, and then the time to read it.
	patience time.Duration

	listening atomic.Bool
	at        netip.AddrPort // zero: it does not listen
	server    *http.Server
}

// Collector is a metric that a program has beside the node's.
type Collector = prometheus.Collector

// NewServer is a server that does not listen yet. sample is called for each scrape; it may be called more than once at
// the same time. beside are the program's own metrics, which the node does not know; two of one name are a fault of
// the program.
func NewServer(sample func() (*Sample, error), log *slog.Logger, beside ...Collector) *Server {
	process := prometheus.NewRegistry()
	process.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	process.MustRegister(beside...)
	return &Server{sample: sample, log: log, process: process, turns: make(chan struct{}, scrapesMax), patience: defaultPatience}
}

// Change is another address to listen at, opened already. Either Commit or Drop has to be called;
// Drop after Commit does nothing.
type Change struct {
	server   *Server
	at       netip.AddrPort
	listener net.Listener // nil: nothing changes, or nothing is listened at
}

// Prepare opens an address beside the present one; the zero value is none.
func (s *Server) Prepare(ctx context.Context, at netip.AddrPort) (*Change, error) {
	c := &Change{server: s, at: at}
	if at == s.at || !at.IsValid() {
		return c, nil
	}
	network := "tcp6"
	switch {
	case at.Addr().Is4():
		network = "tcp4"
	case at.Addr().IsUnspecified():
		network = "tcp" // [::] is every address, also those of IPv4
	}
	var config net.ListenConfig
	l, err := config.Listen(ctx, network, at.String())
	if err != nil {
		return nil, fmt.Errorf("open %s, %s: %w", cmp.Or(s.Setting, "metrics.listen"), at, listenError(err))
	}
	c.listener = &limited{Listener: l, permits: make(chan struct{}, connectionsMax), closed: make(chan struct{})}
	return c, nil
}

// listenError adds the remedy to an error about an address that cannot be opened.
func listenError(err error) error {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return err
	}
	switch errno {
	case syscall.EADDRINUSE:
		return fmt.Errorf("%w; stop the program that listens there (`ss -ltnp` names it), or choose another port", errno)
	case syscall.EADDRNOTAVAIL:
		return fmt.Errorf("%w: this machine does not have the address; write one that it has", errno)
	}
	return errno
}

// Commit answers at the new address, and no longer at the one before.
func (c *Change) Commit() {
	s := c.server
	if c.at == s.at {
		return
	}
	s.Close()
	s.at = c.at
	if c.listener == nil {
		return
	}
	server := &http.Server{
		Handler:           http.HandlerFunc(s.answer),
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       headerTimeout,
		WriteTimeout:      2 * s.patience, // the wait and the reading
		MaxHeaderBytes:    headerBytesMax,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug), // a client's faults are not the operator's
	}
	server.SetKeepAlivesEnabled(false)
	listener, at := c.listener, c.at
	c.listener, s.server = nil, server
	s.listening.Store(true)
	go func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			s.log.Error("metrics are no longer answered; restart the daemon when it suits", "listen", at, "error", err)
		}
	}()
}

// Drop closes the address that Prepare has opened.
func (c *Change) Drop() {
	if c.listener != nil {
		_ = c.listener.Close() // no scrape has been answered
		c.listener = nil
	}
}

// Listening reports whether there is an address to scrape. It may be called at any time.
func (s *Server) Listening() bool { return s.listening.Load() }

// Close ends the answers, also those under way.
func (s *Server) Close() {
	if s.server != nil {
		_ = s.server.Close() // a scrape that is cut off is a failed scrape
	}
	s.server, s.at = nil, netip.AddrPort{}
	s.listening.Store(false)
}

// answer is one request.
func (s *Server) answer(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.URL.Path != path:
		http.Error(w, "metrics are at "+path, http.StatusNotFound)
		return
	case r.Method != http.MethodGet && r.Method != http.MethodHead:
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "ask with GET", http.StatusMethodNotAllowed)
		return
	}
	turn := time.NewTimer(s.patience)
	defer turn.Stop()
	select {
	case s.turns <- struct{}{}:
		defer func() { <-s.turns }()
	case <-r.Context().Done():
		return
	case <-turn.C:
		http.Error(w, fmt.Sprintf("%d other scrapes are being answered", scrapesMax), http.StatusServiceUnavailable)
		return
	}
	text, err := s.text()
	if err != nil {
		s.log.Debug("a scrape failed", "error", err)
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", contentType)
	w.Header().Set("Content-Length", strconv.Itoa(len(text)))
	_, _ = w.Write(text) // a client that has gone asks again
}

// text is the whole answer.
func (s *Server) text() ([]byte, error) {
	sample, err := s.sample()
	if err != nil {
		return nil, err
	}
	text := sample.Text(make([]byte, 0, s.size.Load()+s.size.Load()/8))
	of, err := s.process.Gather()
	if err != nil {
		return nil, fmt.Errorf("gather the figures of this process: %w", err)
	}
	all := bytes.NewBuffer(text)
	for _, family := range of {
		if _, err := expfmt.MetricFamilyToText(all, family); err != nil {
			return nil, fmt.Errorf("write %s: %w", family.GetName(), err)
		}
	}
	s.size.Store(int64(all.Len()))
	return all.Bytes(), nil
}

// limited is a listener with so many connections at most; others wait.
type limited struct {
	net.Listener
	permits chan struct{}
	once    sync.Once
	closed  chan struct{}
}

// Accept waits for a permit, and then for a client.
func (l *limited) Accept() (net.Conn, error) {
	select {
	case l.permits <- struct{}{}:
	case <-l.closed:
		return nil, net.ErrClosed
	}
	c, err := l.Listener.Accept()
	if err != nil {
		<-l.permits
		return nil, err
	}
	return &permitted{Conn: c, leave: sync.OnceFunc(func() { <-l.permits })}, nil
}

// Close may be called more than once.
func (l *limited) Close() error {
	l.once.Do(func() { close(l.closed) })
	return l.Listener.Close()
}

// permitted is a connection that holds a permit.
type permitted struct {
	net.Conn
	leave func()
}

// Close may be called more than once.
func (p *permitted) Close() error {
	defer p.leave()
	return p.Conn.Close()
}
