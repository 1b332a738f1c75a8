package health

import (
	"context"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// ask probes once, with a timeout of a second unless the check has another.
func ask(t *testing.T, at string, h model.Health) error {
	t.Helper()
	if h.Timeout == 0 {
		h.Timeout = 10 * time.Second
	}
	to := target{owner: owner{service: "web"}, name: "green", health: h, endpoint: endpoint{at: netip.MustParseAddrPort(at)}}
	to.backend = model.BackendAddress{Address: to.at.Addr(), Port: to.at.Port()}
	ctx, cancel := context.WithTimeout(context.Background(), h.Timeout)
	defer cancel()
	return newProber(reach{target: to}).probe(ctx)
}

// strayError is the error of a probe that has not taken its way.
type strayError struct{}

func (strayError) Error() string { return "astray" }
func (strayError) NotMade() bool { return true }

// TestDirectProbes go where the target says, by the way for direct return. That a probe did not take this way
// is known even if it shows only when the probe's time is over.
func TestDirectProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, check := range []model.HealthCheck{model.CheckTCP, model.CheckHTTP, model.CheckHTTPS, model.CheckGRPC, model.CheckUDP} {
			to := target{endpoint: endpoint{netip.MustParseAddrPort("192.0.2.10:80"), model.ForwardingDSRGUE}, health: model.Health{Check: check}}
			to.backend.Address = netip.MustParseAddr("10.0.0.2")
			asked := ""
			dial := func(ctx context.Context, network string, vip netip.AddrPort, backend netip.Addr, forwarding model.Forwarding) (net.Conn, error) {
				asked = fmt.Sprint(network, " ", vip, " at ", backend, " by ", forwarding)
				<-ctx.Done()
				time.Sleep(time.Millisecond) // the client has seen that ctx is over, if it looks
				return nil, strayError{}
			}
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
			err := newProber(reach{to, dial}).probe(ctx)
			cancel()
			network := "tcp"
			if check == model.CheckUDP {
				network = "udp"
			}
			if want := network + " 192.0.2.10:80 at 10.0.0.2 by dsr-gue"; asked != want || !isHere(err) {
				t.Errorf("%s asked %q, want %q, and said %v", check, asked, want, err)
			}
		}
	})
}

// says expects a probe's cause, with want as a part, or none.
func says(t *testing.T, what string, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Errorf("%s: %v, want success", what, err)
	case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
		t.Errorf("%s: %v, want %q", what, err, want)
	}
}

// nobody returns an address where nothing listens.
func nobody(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// silent starts a TCP server that says nothing and never closes; ends receives the error with which a connection
// ends.
func silent(t *testing.T, first string) (address string, ends chan error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	ends = make(chan error, 16)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				if first != "" {
					fmt.Fprint(conn, first)
				}
				for {
					if _, err := conn.Read(make([]byte, 4096)); err != nil {
						ends <- err
						return
					}
				}
			}()
		}
	}()
	return l.Addr().String(), ends
}

var short = 50 * time.Millisecond

func TestTCPProbe(t *testing.T) {
	h := model.Health{Check: model.CheckTCP}
	address, ends := silent(t, "")
	says(t, "a server", ask(t, address, h), "")
	if err := <-ends; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection ended with %v, want a reset, which leaves nothing in TIME_WAIT", err)
	}
	says(t, "nobody", ask(t, nobody(t), h), "tcp connect: connection refused")
	says(t, "no port", ask(t, "127.0.0.1:0", h), "there is no port")
}

func TestCauseOfATimeout(t *testing.T) {
	for _, err := range []error{context.DeadlineExceeded, &net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}} {
		if got := cause("tcp connect", err, time.Second).Error(); got != "tcp connect: no answer within 1s" {
			t.Errorf("%v is %q", err, got)
		}
	}
	// The kernel's own timeout, after its retransmissions, is named as such.
	if got := cause("tcp connect", &net.OpError{Err: os.NewSyscallError("connect", syscall.ETIMEDOUT)}, time.Second).Error(); got != "tcp connect: connection timed out" {
		t.Errorf("ETIMEDOUT is %q", got)
	}
}

func TestHTTPProbe(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Agent", r.UserAgent())
		switch r.URL.Path {
		case "/host":
			fmt.Fprint(w, r.Host)
		case "/moved":
			http.Redirect(w, r, "/500", http.StatusFound)
		case "/slow":
			<-r.Context().Done()
		default:
			code, _ := strconv.Atoi(strings.Trim(r.URL.Path, "/"))
			w.WriteHeader(code)
			fmt.Fprint(w, r.URL.RawQuery)
		}
	}))
	defer server.Close()
	address := server.Listener.Addr().String()
	quiet, _ := silent(t, "")
	garbage, _ := silent(t, "SSH-2.0-nothing\r\n\r\n")
	good := []model.StatusRange{{First: 200, Last: 399}}
	for _, c := range []struct {
		what, at string
		http     model.HealthHTTP
		want     string
	}{
		{"200", address, model.HealthHTTP{Path: "/200", Statuses: good}, ""},
		{"500", address, model.HealthHTTP{Path: "/500", Statuses: good}, "http status 500 Internal Server Error, want 200-399"},
		{"404 if that is wanted", address, model.HealthHTTP{Path: "/404", Statuses: []model.StatusRange{{First: 200, Last: 200}, {First: 404, Last: 404}}}, ""},
		{"another than two", address, model.HealthHTTP{Path: "/403", Statuses: []model.StatusRange{{First: 200, Last: 200}, {First: 404, Last: 404}}}, "want 200 or 404"},
		{"a redirect is not followed", address, model.HealthHTTP{Path: "/moved", Statuses: good}, ""},
		{"Host", address, model.HealthHTTP{Path: "/host", Host: "www.example.com", Statuses: good, Body: "www.example.com"}, ""},
		{"Host by default", address, model.HealthHTTP{Path: "/host", Statuses: good, Body: address}, ""},
		{"body", address, model.HealthHTTP{Path: "/200?ready=yes", Statuses: good, Body: "ready=yes"}, ""},
		{"another body", address, model.HealthHTTP{Path: "/200?ready=no", Statuses: good, Body: "ready=yes"}, `http body: "ready=no" does not have "ready=yes" in it`},
		{"nobody", nobody(t), model.HealthHTTP{Path: "/", Statuses: good}, "tcp connect: connection refused"},
		{"no HTTP", garbage, model.HealthHTTP{Path: "/", Statuses: good}, "http answer: "},
	} {
		says(t, c.what, ask(t, c.at, model.Health{Check: model.CheckHTTP, HTTP: c.http}), c.want)
	}
	hangs := model.Health{Check: model.CheckHTTP, Timeout: short, HTTP: model.HealthHTTP{Path: "/slow", Statuses: good}}
	says(t, "a page that hangs", ask(t, address, hangs), "http answer: no answer within 50ms")
	says(t, "a server that hangs", ask(t, quiet, hangs), "http answer: no answer within 50ms")
}

// TestHTTPSProbe uses httptest's certificate, which is for example.com and 127.0.0.1.
func TestHTTPSProbe(t *testing.T) {
	names := make(chan string, 16)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	server.TLS = &tls.Config{GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		names <- hello.ServerName
		return nil, nil
	}}
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // the handshakes are to fail
	server.StartTLS()
	defer server.Close()
	address := server.Listener.Addr().String()
	authority := filepath.Join(t.TempDir(), "ca.pem")
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	if err := os.WriteFile(authority, text, 0o600); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(t.TempDir(), "empty.pem")
	if err := os.WriteFile(empty, []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}
	plain := httptest.NewServer(http.NotFoundHandler())
	defer plain.Close()
	quiet, _ := silent(t, "")
	garbage, _ := silent(t, "SSH-2.0-nothing\r\n\r\n")
	for _, c := range []struct {
		what, at, host string
		tls            model.HealthTLS
		sni, want      string
	}{
		{"unknown authority", address, "", model.HealthTLS{}, "", "tls handshake: x509: certificate signed by unknown authority; set ca_file to its authority"},
		{"not verified", address, "", model.HealthTLS{NoVerify: true}, "", ""},
		{"authority, by address", address, "", model.HealthTLS{CAFile: authority}, "", ""},
		{"name from the host", address, "example.com:443", model.HealthTLS{CAFile: authority}, "example.com", ""},
		{"name of its own", address, "other.test", model.HealthTLS{CAFile: authority, ServerName: "example.com"}, "example.com", ""},
		{"the certificate is for another name", address, "", model.HealthTLS{CAFile: authority, ServerName: "other.test"}, "other.test", "tls handshake: x509: certificate is valid for example.com"},
		{"SNI without verification", address, "", model.HealthTLS{NoVerify: true, ServerName: "other.test"}, "other.test", ""},
		{"no such file", address, "", model.HealthTLS{CAFile: "/nonexistent.pem"}, "-", "ca_file: open /nonexistent.pem"},
		{"nothing in it", address, "", model.HealthTLS{CAFile: empty}, "-", "has no PEM certificate"},
		{"HTTP", plain.Listener.Addr().String(), "", model.HealthTLS{}, "-", "tls handshake: http: server gave HTTP response to HTTPS client"},
		{"no TLS", garbage, "", model.HealthTLS{}, "-", "tls handshake: the backend does not speak TLS"},
		{"silence", quiet, "", model.HealthTLS{}, "-", "tls handshake: no answer within"},
	} {
		h := model.Health{Check: model.CheckHTTPS, TLS: c.tls, HTTP: model.HealthHTTP{Path: "/", Host: c.host, Statuses: []model.StatusRange{{First: 200, Last: 200}}}}
		if c.at == quiet {
			h.Timeout = short
		}
		says(t, c.what, ask(t, c.at, h), c.want)
		if c.sni == "-" {
			continue
		}
		if got := <-names; got != c.sni {
			t.Errorf("%s: the server was asked for name %q, want %q", c.what, got, c.sni)
		}
	}
}

// grpcServer speaks gRPC over HTTP/2 without TLS.
func grpcServer(t *testing.T, handler http.Handler) string {
	server := httptest.NewUnstartedServer(handler)
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

func TestGRPCProbe(t *testing.T) {
	statuses := map[string]int32{"": 1, "web": 1, "ill": 2, "odd": 77}
	address := grpcServer(t, connect.NewUnaryHandler(grpcProcedure,
		func(_ context.Context, r *connect.Request[wrapperspb.StringValue]) (*connect.Response[wrapperspb.Int32Value], error) {
			status, known := statuses[r.Msg.GetValue()]
			switch {
			case r.Msg.GetValue() == "locked":
				return nil, connect.NewError(connect.CodePermissionDenied, errors.New("not for you"))
			case !known:
				return nil, connect.NewError(connect.CodeNotFound, errors.New("unknown service"))
			}
			return connect.NewResponse(wrapperspb.Int32(status)), nil
		}))
	other := grpcServer(t, http.NotFoundHandler())
	quiet, _ := silent(t, "")
	for _, c := range []struct{ at, service, want string }{
		{address, "", ""},
		{address, "web", ""},
		{address, "ill", "grpc status NOT_SERVING, want SERVING"},
		{address, "odd", "grpc status 77"},
		{address, "nobody", `grpc: the backend knows no service "nobody"`},
		{address, "locked", `grpc: permission_denied: "not for you"`},
		{other, "", "grpc: the backend does not have grpc.health.v1"},
		{nobody(t), "", "tcp connect: connection refused"},
		{quiet, "", "grpc answer: no answer within"},
	} {
		h := model.Health{Check: model.CheckGRPC, GRPC: model.HealthGRPC{Service: c.service}}
		if c.at == quiet {
			h.Timeout = short
		}
		says(t, "service "+c.service, ask(t, c.at, h), c.want)
	}
}

func TestUDPProbe(t *testing.T) {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	go func() {
		buffer := make([]byte, 65536)
		for {
			n, from, err := conn.ReadFrom(buffer)
			if err != nil {
				return
			}
			if string(buffer[:n]) != "be silent" {
				conn.WriteTo(append([]byte("echo "), buffer[:n]...), from)
			}
		}
	}()
	closed, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	for _, c := range []struct {
		what, at string
		udp      model.HealthUDP
		want     string
	}{
		{"any answer", conn.LocalAddr().String(), model.HealthUDP{Send: "ping"}, ""},
		{"any bytes", conn.LocalAddr().String(), model.HealthUDP{Send: "\x00\xff", Expect: "\xff"}, ""},
		{"another answer", conn.LocalAddr().String(), model.HealthUDP{Send: "ping", Expect: "pong"}, `udp answer: "echo ping" does not have "pong" in it`},
		{"silence", conn.LocalAddr().String(), model.HealthUDP{Send: "be silent"}, "udp answer: no answer within 50ms"},
		{"silence that passes", conn.LocalAddr().String(), model.HealthUDP{Send: "be silent", SilencePasses: true}, ""},
		{"another answer where silence passes", conn.LocalAddr().String(), model.HealthUDP{Send: "ping", Expect: "pong", SilencePasses: true}, `udp answer: "echo ping" does not have "pong" in it`},
		{"nobody where silence passes", closed.LocalAddr().String(), model.HealthUDP{Send: "ping", SilencePasses: true}, "udp answer: connection refused"},
		{"nobody", closed.LocalAddr().String(), model.HealthUDP{Send: "ping"}, "udp answer: connection refused"},
	} {
		h := model.Health{Check: model.CheckUDP, UDP: c.udp}
		if strings.HasPrefix(c.what, "silence") {
			h.Timeout = short
		}
		says(t, c.what, ask(t, c.at, h), c.want)
	}
}

func TestExecProbe(t *testing.T) {
	run := func(timeout time.Duration, command ...string) error {
		return ask(t, "127.0.0.1:8080", model.Health{Check: model.CheckExec, Timeout: timeout, Exec: command})
	}
	says(t, "true", run(0, "/bin/true"), "")
	says(t, "an exit code and what it says", run(0, "/bin/sh", "-c", "echo it is ill; echo more; exit 3"), `exec: exit code 3: "it is ill"`)
	says(t, "no program", run(0, "/nonexistent"), "exec: fork/exec /nonexistent: no such file or directory")
	says(t, "its environment", run(0, "/bin/sh", "-c", `test "$SHUNT_SERVICE $SHUNT_BACKEND $SHUNT_ADDRESS $SHUNT_PORT" = "web green 127.0.0.1 8080"`), "")
	says(t, "it dies", run(0, "/bin/sh", "-c", "kill -SEGV $$"), "exec: signal: segmentation fault")
	says(t, "much output", run(0, "/bin/sh", "-c", "head -c 1000000 /dev/zero"), "")
}

// TestExecProbeEndsItsGroup has a program leave a child behind, once when it hangs and once
// when it ends: the child must end, too.
func TestExecProbeEndsItsGroup(t *testing.T) {
	for _, c := range []struct{ how, then, want string }{
		{"that hangs", "wait", "exec: the program did not finish within 300ms and was killed"},
		{"that ends", "exit 0", ""},
	} {
		note := filepath.Join(t.TempDir(), "child")
		began := time.Now()
		err := ask(t, "127.0.0.1:8080", model.Health{Check: model.CheckExec, Timeout: 300 * time.Millisecond,
			Exec: []string{"/bin/sh", "-c", "sleep 1000 & echo $! >" + note + "; " + c.then}})
		says(t, "a program "+c.how, err, c.want)
		if took := time.Since(began); took > 20*time.Second {
			t.Errorf("a program %s took %s", c.how, took)
		}
		text, err := os.ReadFile(note)
		if err != nil {
			t.Fatal(err)
		}
		child, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", child))
			if err != nil || strings.Contains(string(state), ") Z ") {
				break // gone, or waiting for an init that reaps
			}
			if time.Now().After(deadline) {
				t.Fatalf("the child of a program %s lives on", c.how)
			}
		}
	}
}
