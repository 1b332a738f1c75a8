package control

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/message"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// glue implements both services with a Handler: it checks requests, and converts errors to the API's codes.
type glue struct {
	handler Handler
	events  *Events
	reading reading
}

// reading makes one reading of the maps serve all requests that arrive meanwhile: reading takes a while with
// many services, and readers may keep one CPU busy with it, but no more.
type reading struct {
	turn sync.Mutex // held by the request that reads
	mu   sync.Mutex
	next *reader // has not begun: a request that comes now may have its answer
}

type reader struct {
	done   chan struct{}
	status *shuntv1.GetStatusResponse // it is not changed any more
	err    error
}

// status returns the state as of a moment after the request.
func (g *glue) status(ctx context.Context) (*shuntv1.GetStatusResponse, error) {
	g.reading.mu.Lock()
	r := g.reading.next
	if r == nil {
		r = &reader{done: make(chan struct{})}
		g.reading.next = r
		go func() {
			g.reading.turn.Lock()
			defer g.reading.turn.Unlock()
			g.reading.mu.Lock()
			g.reading.next = nil
			g.reading.mu.Unlock()
			r.status, r.err = g.handler.Status(context.WithoutCancel(ctx))
			close(r.done)
		}()
	}
	g.reading.mu.Unlock()
	select {
	case <-r.done:
		return r.status, r.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// GetStatus returns the whole state.
func (g *glue) GetStatus(ctx context.Context, _ *connect.Request[shuntv1.GetStatusRequest]) (*connect.Response[shuntv1.GetStatusResponse], error) {
	return answered(g.status(ctx))
}

// ListBackends returns every backend.
func (g *glue) ListBackends(ctx context.Context, _ *connect.Request[shuntv1.ListBackendsRequest]) (*connect.Response[shuntv1.ListBackendsResponse], error) {
	s, err := g.status(ctx)
	return answered(&shuntv1.ListBackendsResponse{Backends: s.GetBackends()}, err)
}

// ListOverrides returns every override.
func (g *glue) ListOverrides(context.Context, *connect.Request[shuntv1.ListOverridesRequest]) (*connect.Response[shuntv1.ListOverridesResponse], error) {
	overrides, err := g.handler.Overrides()
	if err != nil {
		return answered[shuntv1.ListOverridesResponse](nil, err)
	}
	return answered(&shuntv1.ListOverridesResponse{Overrides: overrides.Overrides()}, nil)
}

// Watch sends the present conditions and then each change, until the client goes or the daemon ends.
func (g *glue) Watch(ctx context.Context, _ *connect.Request[shuntv1.WatchRequest], stream *connect.ServerStream[shuntv1.WatchResponse]) error {
	events, end, ok := g.events.watch()
	if !ok {
		return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("%d clients watch already, and there is room for no more", watchersMax))
	}
	defer end()
	// The server sends first: until then the client does not know that it is being served.
	if err := stream.Send(&shuntv1.WatchResponse{Time: timestamppb.Now(), Event: "watching"}); err != nil {
		return err
	}
	for _, c := range message.Conditions(g.handler.Conditions()) { // after watch: said twice rather than missed
		if err := stream.Send(&shuntv1.WatchResponse{Time: timestamppb.Now(), Event: "condition", Condition: c}); err != nil {
			return err
		}
	}
	for {
		select {
		case <-ctx.Done():
			return connect.NewError(connect.CodeUnavailable, ErrStopping)
		case event, more := <-events:
			if !more {
				return connect.NewError(connect.CodeResourceExhausted, fmt.Errorf("this client is more than %d events behind; watch again, and read faster", behindMax))
			}
			if err := stream.Send(event); err != nil {
				return err
			}
		}
	}
}

// Reload applies the file, or returns the effects that it would have.
func (g *glue) Reload(ctx context.Context, r *connect.Request[shuntv1.ReloadRequest]) (*connect.Response[shuntv1.ReloadResponse], error) {
	if r.Msg.Plan {
		return answered(g.handler.Plan(ctx))
	}
	return answered(g.handler.Reload(uncancelled(ctx)))
}

// DrainBackend sets a drain.
func (g *glue) DrainBackend(ctx context.Context, r *connect.Request[shuntv1.DrainBackendRequest]) (*connect.Response[shuntv1.OverrideResponse], error) {
	var deadline time.Duration
	if r.Msg.Deadline != nil {
		deadline = r.Msg.Deadline.AsDuration()
		if err := r.Msg.Deadline.CheckValid(); err != nil || deadline <= 0 {
			return nil, badField("deadline", "%s is not in the future", deadline)
		}
	}
	return g.override(ctx, r.Msg.Backend, Override{Kind: KindDrain, Deadline: deadline, Author: authorOf(ctx, r.Header())})
}

// UndrainBackend clears a drain.
func (g *glue) UndrainBackend(ctx context.Context, r *connect.Request[shuntv1.UndrainBackendRequest]) (*connect.Response[shuntv1.OverrideResponse], error) {
	return g.clear(ctx, r.Msg.Backend, []string{KindDrain}, authorOf(ctx, r.Header()))
}

// SetBackendWeight sets a weight.
func (g *glue) SetBackendWeight(ctx context.Context, r *connect.Request[shuntv1.SetBackendWeightRequest]) (*connect.Response[shuntv1.OverrideResponse], error) {
	switch w := r.Msg.Weight; {
	case w == nil:
		return nil, badField("weight", "is missing; 0 to %d, and 0 means no new flows", math.MaxUint16)
	case *w > math.MaxUint16:
		return nil, badField("weight", "%d is above %d", *w, math.MaxUint16)
	}
	return g.override(ctx, r.Msg.Backend, Override{Kind: KindWeight, Weight: uint16(*r.Msg.Weight), Author: authorOf(ctx, r.Header())})
}

// SetBackendHealth sets a health, or clears it.
func (g *glue) SetBackendHealth(ctx context.Context, r *connect.Request[shuntv1.SetBackendHealthRequest]) (*connect.Response[shuntv1.OverrideResponse], error) {
	switch h := r.Msg.Health; h {
	case "up", "down":
		return g.override(ctx, r.Msg.Backend, Override{Kind: KindHealth, Health: h, Author: authorOf(ctx, r.Header())})
	case "auto":
		return g.clear(ctx, r.Msg.Backend, []string{KindHealth}, authorOf(ctx, r.Header()))
	case "":
		return nil, badField("health", "is missing: up, down or auto")
	}
	return nil, badField("health", "%q is none of up, down and auto", r.Msg.Health)
}

// ClearOverrides ends overrides.
func (g *glue) ClearOverrides(ctx context.Context, r *connect.Request[shuntv1.ClearOverridesRequest]) (*connect.Response[shuntv1.OverrideResponse], error) {
	for i, k := range r.Msg.Kinds {
		if !slices.Contains(Kinds, k) {
			return nil, badField(fmt.Sprintf("kinds[%d]", i), "%q is none of drain, weight and health", k)
		}
	}
	author := authorOf(ctx, r.Header())
	switch {
	case r.Msg.All && r.Msg.Backend != "":
		return nil, badField("all", "cannot be set together with a backend")
	case r.Msg.All:
		return g.changed(func(o Overrides) (*shuntv1.OverrideResponse, error) {
			return o.ClearOverrides(uncancelled(ctx), "", r.Msg.Kinds, author)
		})
	}
	return g.clear(ctx, r.Msg.Backend, r.Msg.Kinds, author)
}

// Detach ends the daemon.
func (g *glue) Detach(ctx context.Context, r *connect.Request[shuntv1.DetachRequest]) (*connect.Response[shuntv1.DetachResponse], error) {
	if r.Msg.Instance == "" {
		return nil, badField("instance", "is missing; `instance` in the answer to GetStatus is the daemon's")
	}
	err := g.handler.Detach(uncancelled(ctx), r.Msg.Instance, authorOf(ctx, r.Header()))
	return answered(&shuntv1.DetachResponse{Pid: int32(os.Getpid())}, err)
}

func (g *glue) override(ctx context.Context, backend string, override Override) (*connect.Response[shuntv1.OverrideResponse], error) {
	if err := requireBackend(backend); err != nil {
		return nil, err
	}
	return g.changed(func(o Overrides) (*shuntv1.OverrideResponse, error) {
		return o.Override(uncancelled(ctx), backend, override)
	})
}

func (g *glue) clear(ctx context.Context, backend string, kinds []string, a Author) (*connect.Response[shuntv1.OverrideResponse], error) {
	if err := requireBackend(backend); err != nil {
		return nil, err
	}
	return g.changed(func(o Overrides) (*shuntv1.OverrideResponse, error) {
		return o.ClearOverrides(uncancelled(ctx), backend, kinds, a)
	})
}

// changed answers a change of overrides, if there is a balancer that has them.
func (g *glue) changed(change func(Overrides) (*shuntv1.OverrideResponse, error)) (*connect.Response[shuntv1.OverrideResponse], error) {
	overrides, err := g.handler.Overrides()
	if err != nil {
		return answered[shuntv1.OverrideResponse](nil, err)
	}
	return answered(change(overrides))
}

// selectorBytesMax is longer than any name or address.
const selectorBytesMax = 256

func requireBackend(selector string) error {
	switch {
	case strings.TrimSpace(selector) == "":
		return badField("backend", "is missing: a name, ADDRESS or ADDRESS:PORT")
	case len(selector) > selectorBytesMax:
		return badField("backend", "has %d bytes, the most is %d", len(selector), selectorBytesMax)
	}
	return nil
}

// uncancelled returns a context for a change: the change is not abandoned half-way when its client goes.
func uncancelled(ctx context.Context) context.Context { return context.WithoutCancel(ctx) }

// badField names the field and its fault.
func badField(field, format string, args ...any) error {
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf(field+": "+format, args...))
}

// answered returns an answer or an error with the right code.
func answered[T any](message *T, err error) (*connect.Response[T], error) {
	if err == nil {
		return connect.NewResponse(message), nil
	}
	code := connect.CodeInternal
	var selector SelectorError
	switch {
	case errors.As(err, &selector) && selector.Ambiguous:
		code = connect.CodeInvalidArgument
	case errors.As(err, &selector):
		code = connect.CodeNotFound
	case errors.Is(err, ErrStopping):
		code = connect.CodeUnavailable
	case errors.Is(err, ErrOtherInstance), errors.Is(err, ErrNoBalancer):
		code = connect.CodeFailedPrecondition
	case errors.Is(err, context.Canceled):
		code = connect.CodeCanceled
	}
	return nil, connect.NewError(code, err)
}
