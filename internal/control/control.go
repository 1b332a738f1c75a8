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
}

// Handler is the daemon's side. Calls may come at the same time.
type Handler interface {
	Reload(context.Context) (ReloadResult, error)
	Status(context.Context) (Status, error)
}

const (
	pathReload = "/shunt.v1.Control/Reload"
	pathStatus = "/shunt.v1.Control/Status"
	// A request has no content worth a kilobyte.
	requestSizeMax = 1 << 10
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

func respond[T any](call func(context.Context) (T, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, http.MaxBytesReader(w, r.Body, requestSizeMax))
		result, err := call(r.Context())
		w.Header().Set("Content-Type", "application/json")
		if err != nil {
			w.WriteHeader(http.StatusInternalServerError)
			_ = json.NewEncoder(w).Encode(map[string]string{"code": "internal", "message": err.Error()})
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
	return result, c.call(ctx, pathReload, &result)
}

// Status asks for the daemon's state. The error wraps ErrNoDaemon if nobody is there.
func (c *Client) Status(ctx context.Context) (Status, error) {
	var result Status
	return result, c.call(ctx, pathStatus, &result)
}

func (c *Client) call(ctx context.Context, path string, result any) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://shunt"+path, bytes.NewReader([]byte("{}")))
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
