package control

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"github.com/shunt-lb/shunt/api/v1/shuntv1connect"
)

// connectionsMax is for one socket. It limits only memory and descriptors: a new connection beyond it displaces
// one that waits for its client.
const connectionsMax = 128

// gate is a listener that holds at most connectionsMax connections. A client that opens many and sends nothing
// loses the oldest of them. So it cannot keep other clients out: their connection is the newest, and is served
// at once.
type gate struct {
	net.Listener

	mu    sync.Mutex
	conns []*conn // oldest first
}

func newGate(l net.Listener) *gate { return &gate{Listener: l} }

// connKey finds a request's *conn in its context.
type connKey struct{}

// conn is one client's connection.
type conn struct {
	net.Conn
	gate   *gate
	peer   peer
	calls  atomic.Int32 // so many changes that it asked for are under way
	answer atomic.Int32 // so many of its requests are being answered
}

// Accept makes room if there is none.
func (g *gate) Accept() (net.Conn, error) {
	for {
		inner, err := g.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &conn{Conn: inner, gate: g}
		if u, is := inner.(*net.UnixConn); is {
			if c.peer, err = peerOf(u); err != nil {
				_ = inner.Close() // it has gone already
				continue
			}
		}
		g.mu.Lock()
		var oldest *conn
		if len(g.conns) >= connectionsMax {
			oldest = g.displaceable()
		}
		refused := oldest == nil && len(g.conns) >= connectionsMax
		if !refused {
			g.conns = append(g.conns, c)
		}
		g.mu.Unlock()
		if oldest != nil {
			_ = oldest.Close()
		}
		if refused {
			_ = inner.Close()
			continue
		}
		return c, nil
	}
}

// displaceable returns the connection that is missed least: the oldest without a request, otherwise the oldest
// that only waits for an answer, or reads one; nil: all of them are changing something.
func (g *gate) displaceable() *conn {
	for _, c := range g.conns {
		if c.calls.Load() == 0 && c.answer.Load() == 0 {
			return c
		}
	}
	for _, c := range g.conns {
		if c.calls.Load() == 0 {
			return c
		}
	}
	return nil
}

// Close may be called more than once.
func (c *conn) Close() error {
	c.gate.mu.Lock()
	for i, other := range c.gate.conns {
		if other == c {
			c.gate.conns = append(c.gate.conns[:i], c.gate.conns[i+1:]...)
			break
		}
	}
	c.gate.mu.Unlock()
	return c.Conn.Close()
}

// whole reads a request to its end before the handler runs, and limits the time of each part of the answer. It
// refuses requests for another instance.
func whole(instance string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			w.Header().Set("Allow", http.MethodPost)
			http.Error(w, "ask with POST, as `curl -d '{}'` does", http.StatusMethodNotAllowed)
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, requestBytesMax))
		if tooLong := (*http.MaxBytesError)(nil); errors.As(err, &tooLong) {
			refuse(w, r, connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("the request has more than %d bytes", tooLong.Limit)))
			return
		}
		if err != nil {
			return // the client has gone, or took too long
		}
		// This comes after reading the request: a client that is still writing would not see the answer.
		if meant := word(r.Header.Get(instanceHeader)); meant != "" && meant != instance {
			refuse(w, r, connect.NewError(connect.CodeFailedPrecondition, fmt.Errorf("%w: this is %q, but the request is for %q; name the socket of that one", ErrOtherInstance, instance, meant)))
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		// The content type that `curl -d` sends by default is never right here.
		if t := r.Header.Get("Content-Type"); t == "" || t == "application/x-www-form-urlencoded" {
			r.Header.Set("Content-Type", "application/json")
		}
		control := http.NewResponseController(w)
		// From here on the client only waits, which the server would consider slowness, too.
		_ = control.SetReadDeadline(time.Time{})
		_ = control.SetWriteDeadline(time.Time{})
		out := &timed{ResponseWriter: w, control: control}
		if c, is := r.Context().Value(connKey{}).(*conn); is {
			out.conn = c
			c.calls.Add(1)
			if !strings.HasPrefix(r.URL.Path, "/"+shuntv1connect.ControlServiceName+"/") {
				out.answers() // a client that only reads can ask again
			}
			defer func() {
				out.answers()
				c.answer.Add(-1)
			}()
		}
		next.ServeHTTP(out, r)
		out.limit() // for data that are still in buffers
	})
}

// timed limits the time of each write to a client.
type timed struct {
	http.ResponseWriter
	control  *http.ResponseController
	conn     *conn
	answered bool
}

// answers marks that the daemon's part is done, and the client's begins.
func (t *timed) answers() {
	if t.conn != nil && !t.answered {
		t.answered = true
		t.conn.answer.Add(1)
		t.conn.calls.Add(-1)
	}
}

func (t *timed) limit() { _ = t.control.SetWriteDeadline(time.Now().Add(writeTimeout)) }

func (t *timed) Write(p []byte) (int, error) {
	t.answers()
	t.limit()
	return t.ResponseWriter.Write(p)
}

// Flush sends the data of a stream, after each message.
func (t *timed) Flush() {
	t.limit()
	_ = t.control.Flush()
}

// Unwrap implements the interface of http.ResponseController.
func (t *timed) Unwrap() http.ResponseWriter { return t.ResponseWriter }

// refuse answers in the protocol of the request.
func refuse(w http.ResponseWriter, r *http.Request, err *connect.Error) {
	writer := connect.NewErrorWriter()
	if writer.IsSupported(r) {
		_ = writer.Write(w, r, err)
		return
	}
	http.Error(w, err.Message(), http.StatusNotFound)
}
