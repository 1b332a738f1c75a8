// Package control is the conversation between the daemon and the commands that ask it
// for something: JSON over HTTP on a unix socket, one POST per request.
//
//	curl --unix-socket /run/shunt/shunt.sock -d '{}' http://shunt/shunt.v1.Control/Status
//
// Who may open the socket file may use it; it is made with mode 0600.
package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/reconcile"
	"github.com/shunt-lb/shunt/internal/source/file"
)

// ReloadResult is what became of a reload.
type ReloadResult struct {
	Applied    bool                 `json:"applied"`
	Faults     []file.Fault         `json:"faults,omitempty"`  // of the file; any error among them refuses it
	Refused    string               `json:"refused,omitempty"` // why nothing was applied, if not for a fault
	Difference reconcile.Difference `json:"difference"`
	Text       string               `json:"text"` // Difference in words
}

// Attachment is an interface the data plane runs on.
type Attachment struct {
	Interface string `json:"interface"`
	Mode      string `json:"mode"`
	Reason    string `json:"reason,omitempty"` // why not the mode above it
}

// Status is what only the daemon knows; counters are read from the maps themselves.
type Status struct {
	PID         int                   `json:"pid"`
	Since       time.Time             `json:"since"`
	ConfigPath  string                `json:"config_path"`
	Instance    string                `json:"instance"`
	Attachments []Attachment          `json:"attachments"`
	Conditions  []condition.Condition `json:"conditions"`
	Drains      []Drain               `json:"drains"`
	// Closed are the backends that get no new flows in some service. Where no slot names such a
	// one, the maps do not tell whose it is.
	Closed []ClosedBackend `json:"closed_backends"`
	// Transition and Marked are slots of direct return and affinity whose flows are looked up,
	// because the table has changed lately or because older flows are elsewhere.
	Transition int `json:"slots_in_transition"`
	Marked     int `json:"slots_marked"`
}

// Drain is an operator's wish that a backend gets no new flows.
type Drain struct {
	Backend  string    `json:"backend"` // as the configuration names it
	Since    time.Time `json:"since"`
	Deadline time.Time `json:"deadline,omitzero"` // from then on its flows are not followed any more; zero: never
	By       string    `json:"by"`
}

// ClosedBackend is a backend that has weight 0 or is drained.
type ClosedBackend struct {
	Backend  string   `json:"backend"`
	Services []string `json:"services"` // where it gets no new flows
}

// DrainRequest asks for a drain.
type DrainRequest struct {
	Backend  string        `json:"backend"`               // a name, or address or address:port
	Deadline time.Duration `json:"deadline_ns,omitempty"` // from now; 0: none
	By       string        `json:"by"`
}

// UndrainRequest ends a drain.
type UndrainRequest struct {
	Backend string `json:"backend"`
}

// DrainResult is what became of a request to drain or undrain.
type DrainResult struct {
	Refused    string               `json:"refused,omitempty"`  // why nothing was changed
	Backends   []string             `json:"backends,omitempty"` // addresses of those concerned
	Difference reconcile.Difference `json:"difference"`
	Text       string               `json:"text"` // Difference in words
}

// Handler is the daemon's side. Calls may come at the same time.
type Handler interface {
	Reload(context.Context, struct{}) (ReloadResult, error)
	Status(context.Context, struct{}) (Status, error)
	Drain(context.Context, DrainRequest) (DrainResult, error)
	Undrain(context.Context, UndrainRequest) (DrainResult, error)
}

const (
	pathReload  = "/shunt.v1.Control/Reload"
	pathStatus  = "/shunt.v1.Control/Status"
	pathDrain   = "/shunt.v1.Control/Drain"
	pathUndrain = "/shunt.v1.Control/Undrain"
	// No request has content worth more.
	requestSizeMax = 4 << 10
)

// Serve answers on a new socket at path until ctx ends. A socket nobody listens on any
// more is replaced; one that answers is an error.
func Serve(ctx context.Context, path string, h Handler) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("make the folder of the control socket: %w", err)
	}
	if conn, err := net.Dial("unix", path); err == nil {
		_ = conn.Close()
		return fmt.Errorf("open the control socket %s: another process answers there; stop it, or choose another path with `api: {socket: …}`", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("replace the dead control socket %s: %w", path, err)
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return fmt.Errorf("open the control socket %s: %w", path, err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		_ = listener.Close()
		return fmt.Errorf("restrict the control socket %s: %w", path, err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+pathReload, respond(h.Reload))
	mux.HandleFunc("POST "+pathStatus, respond(h.Status))
	mux.HandleFunc("POST "+pathDrain, respond(h.Drain))
	mux.HandleFunc("POST "+pathUndrain, respond(h.Undrain))
	server := &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       5 * time.Second,
		IdleTimeout:       30 * time.Second,
		BaseContext:       func(net.Listener) context.Context { return ctx },
	}
	go func() {
		<-ctx.Done()
		_ = server.Close() // removes the socket too
	}()
	go func() { _ = server.Serve(listener) }()
	return nil
}

func respond[Q, T any](call func(context.Context, Q) (T, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		refuse := func(status int, code string, err error) {
			w.WriteHeader(status)
			_ = json.NewEncoder(w).Encode(map[string]string{"code": code, "message": err.Error()})
		}
		var request Q
		decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, requestSizeMax))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&request); err != nil && !errors.Is(err, io.EOF) {
			refuse(http.StatusBadRequest, "invalid_argument", fmt.Errorf("read the request's JSON: %w", err))
			return
		}
		result, err := call(r.Context(), request)
		if err != nil {
			refuse(http.StatusInternalServerError, "internal", err)
			return
		}
		_ = json.NewEncoder(w).Encode(result)
	}
}

// ErrNoDaemon says that nobody answers at the socket.
var ErrNoDaemon = errors.New("no daemon answers")

// ErrNoSocket says that there is no socket file at all, not even one of a killed daemon.
var ErrNoSocket = errors.New("no such file")

// Client asks the daemon behind one socket.
type Client struct {
	path string
	http *http.Client
}

// NewClient is a client of the socket at path. It connects with each request.
func NewClient(path string) *Client {
	return &Client{path: path, http: &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		},
		DisableKeepAlives: true,
	}}}
}

// Reload has the daemon read its file again, and waits.
func (c *Client) Reload(ctx context.Context) (ReloadResult, error) {
	var result ReloadResult
	return result, c.call(ctx, pathReload, struct{}{}, &result)
}

// Drain has a backend get no new flows, in every service that has it.
func (c *Client) Drain(ctx context.Context, request DrainRequest) (DrainResult, error) {
	var result DrainResult
	return result, c.call(ctx, pathDrain, request, &result)
}

// Undrain ends a drain.
func (c *Client) Undrain(ctx context.Context, request UndrainRequest) (DrainResult, error) {
	var result DrainResult
	return result, c.call(ctx, pathUndrain, request, &result)
}

// Status asks for the daemon's state. The error wraps ErrNoDaemon if nobody is there.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var result Status
	return result, c.call(ctx, pathStatus, struct{}{}, &result)
}

func (c *Client) call(ctx context.Context, path string, question, result any) error {
	body, err := json.Marshal(question)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://shunt"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := c.http.Do(request)
	if err != nil {
		const advice = "is `shunt run` running? --socket or SHUNT_SOCKET names another socket"
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return fmt.Errorf("%w at %s (%w); %s", ErrNoDaemon, c.path, ErrNoSocket, advice)
		case errors.Is(err, syscall.ECONNREFUSED):
			return fmt.Errorf("%w at %s (%v); %s", ErrNoDaemon, c.path, rootCause(err), advice)
		case errors.Is(err, fs.ErrPermission):
			return fmt.Errorf("ask the daemon at %s: permission denied; run it with sudo", c.path)
		}
		return fmt.Errorf("ask the daemon at %s: %w", c.path, rootCause(err))
	}
	defer response.Body.Close() //nolint:errcheck // nothing is lost
	if response.StatusCode != http.StatusOK {
		var fault struct{ Message string }
		_ = json.NewDecoder(response.Body).Decode(&fault)
		return fmt.Errorf("the daemon at %s: %s", c.path, fault.Message)
	}
	if err := json.NewDecoder(response.Body).Decode(result); err != nil {
		return fmt.Errorf("read the answer of the daemon at %s: %w", c.path, err)
	}
	return nil
}

func rootCause(err error) error {
	for {
		inner := errors.Unwrap(err)
		if inner == nil {
			return err
		}
		err = inner
	}
}
