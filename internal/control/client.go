package control

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"

	"connectrpc.com/connect"
	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/api/v1/shuntv1connect"
)

// ErrNoDaemon means that no process answers at the socket.
var ErrNoDaemon = errors.New("no daemon answers")

// ErrNoSocket means that there is no socket file at all, not even one of a killed daemon.
var ErrNoSocket = errors.New("no such file")

// ErrDenied means that this user may not use the socket.
var ErrDenied = errors.New("permission denied")

// answerBytesMax limits the answers that a client accepts: 100,000 backends are about 60 MB.
const answerBytesMax = 256 << 20

// Client asks the daemon behind one socket. Errors are sentences for the user who typed the command; they wrap
// ErrNoDaemon if no process answers.
type Client struct {
	path    string
	meant   string // the instance; "": whichever answers
	status  shuntv1connect.StatusServiceClient
	control shuntv1connect.ControlServiceClient
}

// NewClient returns a client of the socket at path. It connects with each request.
func NewClient(path string) *Client {
	h := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		},
		DisableKeepAlives:  true,
		DisableCompression: true,
	}}
	client := &Client{path: path}
	options := connect.WithClientOptions(connect.WithReadMaxBytes(answerBytesMax), connect.WithInterceptors(connect.UnaryInterceptorFunc(
		func(next connect.UnaryFunc) connect.UnaryFunc {
			return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
				r.Header().Set("User-Agent", "shunt")
				if client.meant != "" {
					r.Header().Set(instanceHeader, client.meant)
				}
				if name := os.Getenv("SUDO_USER"); name != "" {
					r.Header().Set(userHeader, name)
				}
				return next(ctx, r)
			}
		})))
	client.status = shuntv1connect.NewStatusServiceClient(h, "http://shunt", options)
	client.control = shuntv1connect.NewControlServiceClient(h, "http://shunt", options)
	return client
}

// For makes a daemon of any other instance refuse, with ErrOtherInstance.
func (c *Client) For(instance string) *Client {
	c.meant = instance
	return c
}

// Read asks at a socket, or at the read-only socket beside it, if this user may open only that one. instance is
// the instance that is meant; empty: any.
func Read(socket, instance string, ask func(*Client) error) error {
	err := ask(NewClient(socket).For(instance))
	if errors.Is(err, ErrDenied) {
		reading := ReadSocket(socket)
		if second := ask(NewClient(reading).For(instance)); second == nil || !errors.Is(second, ErrDenied) {
			return second
		}
		return Denied(reading, "read_group")
	}
	return err
}

// Status asks for the whole state.
func (c *Client) Status(ctx context.Context) (*shuntv1.GetStatusResponse, error) {
	return ask(ctx, c, c.status.GetStatus, &shuntv1.GetStatusRequest{})
}

// Overrides asks for the operators' overrides.
func (c *Client) Overrides(ctx context.Context) ([]*shuntv1.Override, error) {
	answer, err := ask(ctx, c, c.status.ListOverrides, &shuntv1.ListOverridesRequest{})
	return answer.GetOverrides(), err
}

// Reload makes the daemon read its file again, and waits.
func (c *Client) Reload(ctx context.Context) (*shuntv1.ReloadResponse, error) {
	return ask(ctx, c, c.control.Reload, &shuntv1.ReloadRequest{})
}

// Plan asks the daemon for the effects of a Reload.
func (c *Client) Plan(ctx context.Context) (*shuntv1.ReloadResponse, error) {
	return ask(ctx, c, c.control.Reload, &shuntv1.ReloadRequest{Plan: true})
}

// Drain keeps new flows from a backend, in every service that has it.
func (c *Client) Drain(ctx context.Context, r *shuntv1.DrainBackendRequest) (*shuntv1.OverrideResponse, error) {
	return ask(ctx, c, c.control.DrainBackend, r)
}

// Undrain ends a drain.
func (c *Client) Undrain(ctx context.Context, r *shuntv1.UndrainBackendRequest) (*shuntv1.OverrideResponse, error) {
	return ask(ctx, c, c.control.UndrainBackend, r)
}

// SetWeight gives a backend another weight than the file.
func (c *Client) SetWeight(ctx context.Context, r *shuntv1.SetBackendWeightRequest) (*shuntv1.OverrideResponse, error) {
	return ask(ctx, c, c.control.SetBackendWeight, r)
}

// SetHealth declares a backend up or down.
func (c *Client) SetHealth(ctx context.Context, r *shuntv1.SetBackendHealthRequest) (*shuntv1.OverrideResponse, error) {
	return ask(ctx, c, c.control.SetBackendHealth, r)
}

// Clear ends overrides.
func (c *Client) Clear(ctx context.Context, r *shuntv1.ClearOverridesRequest) (*shuntv1.OverrideResponse, error) {
	return ask(ctx, c, c.control.ClearOverrides, r)
}

// Detach ends the daemon, makes it remove its data plane, and waits. It returns ErrOtherInstance if the daemon
// at the socket runs another instance.
func (c *Client) Detach(ctx context.Context, instance string) (*shuntv1.DetachResponse, error) {
	return ask(ctx, c, c.control.Detach, &shuntv1.DetachRequest{Instance: instance})
}

func ask[Q, T any](ctx context.Context, c *Client, call func(context.Context, *connect.Request[Q]) (*connect.Response[T], error), question *Q) (*T, error) {
	answer, err := call(ctx, connect.NewRequest(question))
	if err == nil {
		return answer.Msg, nil
	}
	const advice = "is `shunt run` running? --socket or SHUNT_SOCKET names another socket"
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("%w at %s (%w); %s", ErrNoDaemon, c.path, ErrNoSocket, advice)
	case errors.Is(err, syscall.ECONNREFUSED):
		return nil, fmt.Errorf("%w at %s (%v); %s", ErrNoDaemon, c.path, rootCause(err), advice)
	case errors.Is(err, fs.ErrPermission):
		return nil, Denied(c.path, "group")
	}
	if said := (*connect.Error)(nil); errors.As(err, &said) && connect.IsWireError(err) {
		if said.Code() == connect.CodeFailedPrecondition {
			return nil, fmt.Errorf("%w%s", ErrOtherInstance, strings.TrimPrefix(said.Message(), ErrOtherInstance.Error()))
		}
		return nil, errors.New(said.Message()) // the daemon's own words
	}
	return nil, fmt.Errorf("ask the daemon at %s: %w", c.path, rootCause(err))
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
