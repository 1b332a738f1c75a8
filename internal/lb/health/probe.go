package health

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// target describes a check: the endpoint, and the kind of the check.
type target struct {
	owner
	backend model.BackendAddress
	name    string // of the backend
	endpoint
	health model.Health
}

// endpoint is the address at which a backend is checked.
type endpoint struct {
	at netip.AddrPort // for exec, port 0 if the service has several
	// direct: at is a VIP, checked at this backend, by this mode of direct return; "": at is the backend's own
	// address.
	direct model.Forwarding
}

// DialDirect connects to a VIP at one backend, on the path of direct return's packets. The network is tcp or
// udp. An error with a method NotMade that returns true says nothing about the backend.
type DialDirect func(ctx context.Context, network string, vip netip.AddrPort, backend netip.Addr, forwarding model.Forwarding) (net.Conn, error)

// reach is a target and the means to connect to it.
type reach struct {
	target
	dialDirect DialDirect
}

// prober checks once whether a backend is healthy. nil means yes; the error is the cause of a failure, worded
// for the log. It returns when ctx ends at the latest, or soon after; it may be called again, but not
// concurrently.
type prober interface {
	probe(ctx context.Context) error
}

// newProber returns the prober for a target. A target that cannot be checked gets a prober that returns the
// reason each time, so that its backend is down with a cause.
func newProber(r reach) prober {
	if !r.at.IsValid() || r.at.Port() == 0 && r.health.Check != model.CheckExec {
		return broken{errors.New("there is no port to check: give health, or the backend, a port")}
	}
	switch r.health.Check {
	case model.CheckTCP:
		return tcpProber{r}
	case model.CheckHTTP, model.CheckHTTPS:
		return newHTTPProber(r)
	case model.CheckGRPC:
		return newGRPCProber(r)
	case model.CheckUDP:
		return udpProber{r}
	case model.CheckExec:
		return execProber{r.target}
	}
	return broken{fmt.Errorf("unknown check %q", r.health.Check)}
}

// broken is the prober of a target that cannot be checked.
type broken struct{ err error }

func (b broken) probe(context.Context) error { return b.err }

// dial connects.
func (r reach) dial(ctx context.Context, network string) (net.Conn, error) {
	if r.direct != "" {
		return r.dialDirect(ctx, network, r.at, r.backend.Address, r.direct)
	}
	dialer := net.Dialer{KeepAlive: -1}
	return dialer.DialContext(ctx, network, r.at.String())
}

// dialTCP connects. Closing the connection resets it (SO_LINGER 0): no entry stays in TIME_WAIT, which has room
// for one for each local port and backend, and no packets are exchanged to close it.
func (r reach) dialTCP(ctx context.Context) (net.Conn, error) {
	conn, err := r.dial(ctx, "tcp")
	if err != nil {
		return nil, cause("tcp connect", err, r.health.Timeout)
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // without it the check is as right, and leaves more behind
	}
	return conn, nil
}

// connected returns a context for an HTTP client whose dialer is handOver, with a connection. The connection is
// made beforehand because a client whose context ends does not wait for its dialer, which may know a better
// cause. The caller closes the connection.
func (r reach) connected(ctx context.Context) (context.Context, net.Conn, error) {
	conn, err := r.dialTCP(ctx)
	if err != nil {
		return ctx, nil, err
	}
	once := make(chan net.Conn, 1)
	once <- conn
	return context.WithValue(ctx, connection{}, once), conn, nil
}

// connection is the key of the one connection that a probe has.
type connection struct{}

// handOver is the DialContext of HTTP clients.
func handOver(ctx context.Context, _, _ string) (net.Conn, error) {
	select {
	case conn := <-ctx.Value(connection{}).(chan net.Conn):
		return conn, nil
	default:
		return nil, io.ErrUnexpectedEOF // it wants another one: the first was closed by the backend
	}
}

// tcpProber connects, and no more.
type tcpProber struct{ reach }

func (p tcpProber) probe(ctx context.Context) error {
	conn, err := p.dialTCP(ctx)
	if err != nil {
		return err
	}
	_ = conn.Close() // the question is answered
	return nil
}

// udpPayloadMax is the most that fits into a UDP datagram over IPv4 (RFC 768, RFC 791).
const udpPayloadMax = 65507

// udpProber sends a datagram and waits for an answer, or for an ICMP error, which the kernel reports to a
// connected socket (RFC 1122, 4.1.3.3).
type udpProber struct{ reach }

func (p udpProber) probe(ctx context.Context) error {
	conn, err := p.dial(ctx, "udp")
	if err != nil {
		return cause("udp", err, p.health.Timeout)
	}
	defer conn.Close() //nolint:errcheck // nothing is lost
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return cause("udp", err, p.health.Timeout)
		}
	}
	// A process that ends its checks does not wait for the deadline.
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := conn.Write([]byte(p.health.UDP.Send)); err != nil {
		return cause("udp send", err, p.health.Timeout)
	}
	answer := make([]byte, udpPayloadMax)
	n, err := conn.Read(answer)
	if p.health.UDP.SilencePasses && errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(ctx.Err(), context.Canceled) {
		return nil
	}
	if err != nil {
		return cause("udp answer", err, p.health.Timeout)
	}
	if !strings.Contains(string(answer[:n]), p.health.UDP.Expect) {
		return fmt.Errorf("udp answer: %s does not have %s in it", excerpt(answer[:n]), excerpt([]byte(p.health.UDP.Expect)))
	}
	return nil
}

// excerptMax is the length of a backend's text that fits into a line of the log.
const excerptMax = 80

// excerpt returns the beginning of a foreign text, made safe for a log.
func excerpt(text []byte) string {
	more := ""
	if len(text) > excerptMax {
		text, more = text[:excerptMax], "…"
	}
	return fmt.Sprintf("%q%s", text, more)
}

// isHere reports whether a probe failed for lack of a resource on this machine. That says nothing about the
// backend.
func isHere(err error) bool {
	var maybe interface{ NotMade() bool }
	if errors.As(err, &maybe) && maybe.NotMade() {
		return true
	}
	for _, want := range []error{
		syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM, syscall.ENOBUFS, // descriptors, memory
		syscall.EADDRNOTAVAIL, // local ports towards the backend
		syscall.EAGAIN,        // processes, for exec
	} {
		if errors.Is(err, want) {
			return true
		}
	}
	return false
}

// cause describes a failure for the log: the stage, and the error without words that the line contains anyway.
func cause(stage string, err error, timeout time.Duration) error {
	var temporary net.Error
	var errno syscall.Errno
	var op *net.OpError
	var record tls.RecordHeaderError
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded),
		errors.As(err, &temporary) && temporary.Timeout() && !errors.Is(err, syscall.ETIMEDOUT):
		return fmt.Errorf("%s: no answer within %s", stage, timeout)
	case errors.As(err, &errno):
		return fmt.Errorf("%s: %w", stage, errno)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("%s: the backend closed the connection", stage)
	case errors.As(err, &record):
		return fmt.Errorf("%s: the backend does not speak TLS", stage)
	case errors.As(err, &op):
		return fmt.Errorf("%s: %w", stage, op.Err)
	}
	return fmt.Errorf("%s: %w", stage, err)
}
