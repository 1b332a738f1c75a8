// Package control is the conversation between the daemon and its clients,
// the command line first of all. The messages are those of api/v1; here are the sockets they
// come by, who may use them, and the limits that keep a client from stalling the daemon.
//
//	shunt.sock ──────► gate ──► StatusService, ControlService ──► Handler (the daemon)
//	shunt-read.sock ─► gate ──► StatusService ─────────────────►
//
// The files' permissions decide which processes may use it. Only a client's own connection waits
// for the client: requests are read whole before they count, answers are complete before they are
// written, and both have a time limit.
package control

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/api/v1/shuntv1connect"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/settings"
	"golang.org/x/sys/unix"
)

// Handler is the daemon's side. Calls may come at the same time. An error is shown to the caller unchanged;
// ErrStopping, ErrOtherInstance and SelectorError have codes of their own.
type Handler interface {
	Status(context.Context) (*shuntv1.GetStatusResponse, error)
	Conditions() []condition.Condition
	Reload(context.Context) (*shuntv1.ReloadResponse, error)
	// Plan returns the effects of a Reload. Nothing changes.
	Plan(context.Context) (*shuntv1.ReloadResponse, error)
	// Detach ends the daemon and removes everything of it. It returns afterwards.
	Detach(ctx context.Context, instance string, by Author) error
	// Overrides returns the balancer's overrides, or an error with the reason why there is no balancer.
	Overrides() (Overrides, error)
}

// Author is the user who asked for a change.
type Author struct {
	By     string // the user's name
	UID    uint32 // of the process that asked; the kernel told it
	Client string // the client's name for itself: "shunt", "curl/8.14.1"
}

// The kinds of overrides, in the API's words.
const (
	KindDrain  = "drain"
	KindWeight = "weight"
	KindHealth = "health"
)

// Kinds lists all kinds.
var Kinds = []string{KindDrain, KindWeight, KindHealth}

// Override is an override that an author requests. Only the value of its kind is set.
type Override struct {
	Kind     string
	Weight   uint16
	Health   string        // up or down
	Deadline time.Duration // of a drain, from now on; 0: none
	Author
}

// Overrides sets and lists the operators' overrides of backends. A selector is a backend's name, ADDRESS or
// ADDRESS:PORT.
type Overrides interface {
	Overrides() []*shuntv1.Override
	Override(ctx context.Context, selector string, o Override) (*shuntv1.OverrideResponse, error)
	// ClearOverrides is for every backend if the selector is empty, and for all kinds if kinds is empty.
	ClearOverrides(ctx context.Context, selector string, kinds []string, a Author) (*shuntv1.OverrideResponse, error)
}

// SelectorError means that a selector does not identify a backend.
type SelectorError struct {
	Err       error
	Ambiguous bool // several backends match; otherwise none
}

func (e SelectorError) Error() string { return e.Err.Error() }

// Unwrap returns the error.
func (e SelectorError) Unwrap() error { return e.Err }

// ErrStopping refuses a change because the daemon ends.
var ErrStopping = errors.New("the daemon is stopping")

// ErrDraining is ErrStopping while a drain is under way.
var ErrDraining = fmt.Errorf("%w, and waits for flows to end; start it again first", ErrStopping)

// ErrNoBalancer refuses requests that need a balancer.
var ErrNoBalancer = errors.New("this node balances nothing: its configuration has no services, or the balancer could not be started (`shunt status` says why)")

// ErrOtherInstance refuses a request that is meant for another daemon.
var ErrOtherInstance = errors.New("another instance answers")

const (
	headerTimeout = 5 * time.Second
	bodyTimeout   = 10 * time.Second // from the request's first byte
	writeTimeout  = 10 * time.Second // of each piece of an answer
	idleTimeout   = 30 * time.Second
	closeTimeout  = 2 * time.Second // for answers under way when the daemon ends

	// No request needs more.
	requestBytesMax = 16 << 10
	headerBytesMax  = 16 << 10
)

// ReadSocket returns the read-only socket beside a socket for everything: /run/shunt/shunt-read.sock beside
// /run/shunt/shunt.sock.
func ReadSocket(path string) string {
	ext := filepath.Ext(path)
	return strings.TrimSuffix(path, ext) + "-read" + ext
}

// Server answers on both sockets. The zero value of Log stands for the default logger.
type Server struct {
	Instance string
	API      settings.API
	Handler  Handler
	Events   *Events
	Log      *slog.Logger

	ctx       context.Context //nolint:containedctx // of the requests; ends in Stop
	stop      func()
	listeners []net.Listener  // of both sockets
	answering sync.WaitGroup  // one for each
	patience  context.Context //nolint:containedctx // of answers under way; ends in Wait
	giveUp    func()
}

// Listen opens both sockets, until Stop, or until ctx ends. Clients can connect, and wait for Serve. A dead
// socket is replaced; a socket that answers is an error, and so is a group that this machine does not have.
func (s *Server) Listen(ctx context.Context) error {
	if s.Log == nil {
		s.Log = slog.Default()
	}
	if err := os.MkdirAll(filepath.Dir(s.API.Socket), 0o755); err != nil {
		return fmt.Errorf("make the folder of the control socket: %w", err)
	}
	change, err := listen(ctx, s.API.Socket, "group", s.API.Group)
	if err != nil {
		return err
	}
	read, err := listen(ctx, ReadSocket(s.API.Socket), "read_group", s.API.ReadGroup)
	if err != nil {
		_ = change.Close()
		return err
	}
	s.patience, s.giveUp = context.WithCancel(context.WithoutCancel(ctx))
	s.ctx, s.stop = context.WithCancel(ctx)
	s.listeners = []net.Listener{newGate(change), newGate(read)}
	return nil
}

// Serve answers. It is called after Listen.
func (s *Server) Serve() {
	codecs := connect.WithHandlerOptions(connect.WithCodec(jsonCodec{"json"}), connect.WithCodec(jsonCodec{"json; charset=utf-8"}))
	g := &glue{handler: s.Handler, events: s.Events}
	statusPath, status := shuntv1connect.NewStatusServiceHandler(g, codecs)
	controlPath, control := shuntv1connect.NewControlServiceHandler(g, codecs)
	s.answer(s.ctx, s.listeners[0], map[string]http.Handler{statusPath: status, controlPath: control}, "")
	s.answer(s.ctx, s.listeners[1], map[string]http.Handler{statusPath: status},
		"this socket is for reading; requests that change something go to "+s.API.Socket)
}

// Stop removes the sockets: when it returns, no client can ask any more, and another daemon may open them.
// Streams end. Answers under way are still given, until Wait.
func (s *Server) Stop() {
	if s.stop == nil {
		return // it never listened
	}
	s.stop()
	for _, l := range s.listeners {
		_ = l.Close() // which removes the file; a second time, nothing
	}
}

// Wait is called after Stop: it returns when the answers under way have been given. Answers that take longer
// than a moment are given up.
func (s *Server) Wait() {
	if s.stop == nil {
		return
	}
	defer time.AfterFunc(closeTimeout, s.giveUp).Stop()
	s.answering.Wait()
	s.giveUp()
}

// answer serves one socket; otherwise is the text for requests that this socket does not serve.
func (s *Server) answer(ctx context.Context, l net.Listener, services map[string]http.Handler, otherwise string) {
	mux := http.NewServeMux()
	for path, h := range services {
		mux.Handle(path, h)
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		code, text := connect.CodeUnimplemented, fmt.Sprintf("there is no %s; docs/guide/api.md lists the requests", r.URL.Path)
		if otherwise != "" && strings.HasPrefix(r.URL.Path, "/"+shuntv1connect.ControlServiceName+"/") {
			code, text = connect.CodePermissionDenied, otherwise
		}
		refuse(w, r, connect.NewError(code, errors.New(text)))
	})
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true) // gRPC
	server := &http.Server{
		Handler:           whole(s.Instance, mux),
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       bodyTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    headerBytesMax,
		Protocols:         &protocols,
		HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 16, MaxReceiveBufferPerConnection: 64 << 10, MaxReceiveBufferPerStream: 64 << 10,
			SendPingTimeout: idleTimeout, PingTimeout: writeTimeout, WriteByteTimeout: writeTimeout},
		ErrorLog:    slog.NewLogLogger(s.Log.Handler(), slog.LevelDebug), // a client's faults are not the operator's
		BaseContext: func(net.Listener) context.Context { return ctx },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
	}
	s.answering.Go(func() {
		<-ctx.Done()
		_ = server.Shutdown(s.patience)
		_ = server.Close()
	})
	go func() {
		if err := server.Serve(l); ctx.Err() == nil {
			s.Log.Error("the control socket no longer answers; restart the daemon when it suits", "socket", l.Addr(), "error", err)
		}
	}()
}

// listen makes a socket that root may use, and the group if one is named.
func listen(ctx context.Context, path, key, group string) (net.Listener, error) {
	gid := -1
	if group != "" {
		var err error
		if gid, err = groupID(group); err != nil {
			return nil, fmt.Errorf("open the control socket %s: `api: {%s: %s}`: %w", path, key, group, err)
		}
	}
	if err := requireFree(path); err != nil {
		return nil, err
	}
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		// bind(2) makes the file with the mode of the socket (unix_bind in net/unix/af_unix.c), so that there
		// is no moment at which every user may open it.
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }), err)
	}}
	l, err := config.Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("open the control socket %s: %w", path, err)
	}
	if gid >= 0 {
		if err := errors.Join(os.Chown(path, -1, gid), os.Chmod(path, 0o660)); err != nil {
			_ = l.Close()
			return nil, fmt.Errorf("give group %s the control socket %s: %w", group, path, err)
		}
	}
	return l, nil
}

// groupID finds a group by name or number.
func groupID(group string) (int, error) {
	if n, err := strconv.ParseUint(group, 10, 31); err == nil {
		return int(n), nil
	}
	g, err := user.LookupGroup(group)
	if err != nil {
		return 0, fmt.Errorf("this machine has no such group; create it with `groupadd --system %s`", group)
	}
	return strconv.Atoi(g.Gid)
}

// requireFree removes the socket that a killed daemon has left, and no other file.
func requireFree(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("open the control socket %s: %w", path, err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("open the control socket %s: its path is a file that is no socket; shunt leaves it alone; remove the file, or choose another path with `api: {socket: …}`", path)
	}
	c, err := net.Dial("unix", path)
	if err == nil {
		defer c.Close() //nolint:errcheck // nothing was written
		who := "another process"
		if p, err := peerOf(c.(*net.UnixConn)); err == nil {
			who = fmt.Sprintf("process %d", p.pid)
		}
		return fmt.Errorf("open the control socket %s: %s answers there; stop it, or choose another path with `api: {socket: …}`", path, who)
	}
	// A daemon that is too busy to answer (EAGAIN) is not dead.
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("check whether a process listens at the control socket %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("replace the dead control socket %s: %w", path, err)
	}
	return nil
}
