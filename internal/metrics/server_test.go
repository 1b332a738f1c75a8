package metrics

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// listening is a server at a free port of this machine.
func listening(t *testing.T, sample func() (*Sample, error), beside ...prometheus.Collector) *Server {
	t.Helper()
	s := NewServer(sample, slog.New(slog.DiscardHandler), beside...)
	s.patience = time.Second
	t.Cleanup(s.Close)
	move(t, s, free(t))
	return s
}

// free is an address of this machine at which nobody listens.
func free(t *testing.T) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	must(t, l.Close())
	return netip.MustParseAddrPort(l.Addr().String())
}

// move has a server listen somewhere else.
func move(t *testing.T, s *Server, to netip.AddrPort) {
	t.Helper()
	change, err := s.Prepare(t.Context(), to)
	must(t, err)
	change.Commit()
	change.Drop()
}

var client = http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// ask sends a request, and returns the status and the answer.
func ask(t *testing.T, method string, at netip.AddrPort, path string) (int, http.Header, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, "http://"+at.String()+path, nil)
	must(t, err)
	answer, err := client.Do(request)
	must(t, err)
	defer answer.Body.Close() //nolint:errcheck // it is read to the end
	text, err := io.ReadAll(answer.Body)
	must(t, err)
	return answer.StatusCode, answer.Header, string(text)
}

func TestServer(t *testing.T) {
	beside := prometheus.NewCounter(prometheus.CounterOpts{Name: "other_total", Help: "A metric of the program."})
	s := listening(t, func() (*Sample, error) { return example(), nil }, beside)
	status, header, text := ask(t, http.MethodGet, s.at, "/metrics")
	if status != http.StatusOK || header.Get("Content-Type") != contentType {
		t.Errorf("GET /metrics: status %d, %s", status, header.Get("Content-Type"))
	}
	families := parse(t, text)
	for _, name := range []string{"shunt_service_packets_total", "go_goroutines", "process_resident_memory_bytes", "other_total"} {
		if families[name] == nil {
			t.Errorf("the answer has no %s", name)
		}
	}
	if status, _, text := ask(t, http.MethodHead, s.at, "/metrics"); status != http.StatusOK || text != "" {
		t.Errorf("HEAD /metrics: status %d, %q", status, text)
	}
	if status, header, _ := ask(t, http.MethodPost, s.at, "/metrics"); status != http.StatusMethodNotAllowed || header.Get("Allow") != "GET, HEAD" {
		t.Errorf("POST /metrics: status %d, Allow: %s", status, header.Get("Allow"))
	}
	if status, _, text := ask(t, http.MethodGet, s.at, "/"); status != http.StatusNotFound || !strings.Contains(text, "/metrics") {
		t.Errorf("GET /: status %d, %q", status, text)
	}
}

// TestSampleFails: if the sample cannot be read, the answer says so.
func TestSampleFails(t *testing.T) {
	s := listening(t, func() (*Sample, error) { return nil, errors.New("the map is on fire") })
	if status, _, text := ask(t, http.MethodGet, s.at, "/metrics"); status != http.StatusServiceUnavailable || !strings.Contains(text, "on fire") {
		t.Errorf("status %d, %q", status, text)
	}
}

// TestMove: a new address is opened before the old one is closed, and one that cannot be opened changes
// nothing.
func TestMove(t *testing.T) {
	s := listening(t, func() (*Sample, error) { return example(), nil })
	first := s.at
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer taken.Close() //nolint:errcheck // nothing was written
	for address, want := range map[string]string{
		taken.Addr().String(): "address already in use; stop the program that listens there",
		"192.0.2.1:9470":      "this machine does not have the address",
	} {
		if _, err := s.Prepare(t.Context(), netip.MustParseAddrPort(address)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("listen at %s: %v, want %q", address, err, want)
		}
	}
	dropped, err := s.Prepare(t.Context(), free(t))
	must(t, err)
	dropped.Drop()
	if _, err := net.Dial("tcp", dropped.at.String()); err == nil {
		t.Error("what was dropped still listens")
	}
	move(t, s, first) // where it is
	if status, _, _ := ask(t, http.MethodGet, first, "/metrics"); status != http.StatusOK || !s.Listening() {
		t.Errorf("where it was: status %d", status)
	}
	second := free(t)
	move(t, s, second)
	if status, _, _ := ask(t, http.MethodGet, second, "/metrics"); status != http.StatusOK {
		t.Errorf("at the new address: status %d", status)
	}
	if _, err := net.Dial("tcp", first.String()); err == nil {
		t.Error("it still listens at the address before")
	}
	move(t, s, netip.AddrPort{})
	if _, err := net.Dial("tcp", second.String()); err == nil || s.Listening() {
		t.Error("it listens, though it should not")
	}
}

// TestSlowClients: clients that connect and say nothing keep nobody out as long as there is room, and an answer
// that nobody reads holds up as many scrapes as there are turns, and only for a time.
func TestSlowClients(t *testing.T) {
	big := full(1000, 10) // more than the buffers of a connection hold
	s := listening(t, func() (*Sample, error) { again := *big; return &again, nil })
	for range connectionsMax - scrapesMax - 1 {
		silent, err := net.Dial("tcp", s.at.String())
		must(t, err)
		defer silent.Close() //nolint:errcheck // nothing was written
	}
	if status, _, _ := ask(t, http.MethodGet, s.at, "/metrics"); status != http.StatusOK {
		t.Errorf("beside silent clients: status %d", status)
	}
	for range scrapesMax {
		deaf, err := net.Dial("tcp", s.at.String())
		must(t, err)
		defer deaf.Close() //nolint:errcheck // nothing more is written
		_, err = io.WriteString(deaf, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
		must(t, err)
		_, err = io.ReadFull(deaf, make([]byte, 1)) // its turn has come
		must(t, err)
	}
	if status, _, text := ask(t, http.MethodGet, s.at, "/metrics"); status != http.StatusServiceUnavailable || !strings.Contains(text, "2 other scrapes") {
		t.Errorf("beside deaf clients: status %d, %q", status, text)
	}
	for deadline := time.Now().Add(30 * time.Second); ; {
		status, _, text := ask(t, http.MethodGet, s.at, "/metrics")
		if status == http.StatusOK {
			break // the deaf ones have lost their turns
		}
		if time.Now().After(deadline) {
			t.Fatalf("deaf clients keep their turns: status %d, %q", status, text)
		}
	}
}
