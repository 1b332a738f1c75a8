package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/settings"
	"github.com/shunt-lb/shunt/test/golden"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// fake is a daemon that has one backend, and remembers the requests that it got.
type fake struct {
	mu       sync.Mutex
	asked    []Override
	cleared  []string
	reloads  int
	block    chan struct{} // a reload waits for it, if there is one
	entered  chan struct{} // a reload is under way
	services int

	balancesNothing bool
}

func (f *fake) Status(context.Context) (*shuntv1.GetStatusResponse, error) {
	s := &shuntv1.GetStatusResponse{Instance: "default", Forwarding: true, Daemon: &shuntv1.Daemon{Pid: int32(os.Getpid())}}
	for i := range f.services {
		s.Services = append(s.Services, &shuntv1.Service{Name: fmt.Sprintf("service-with-a-long-name-%d", i)})
	}
	s.Backends = []*shuntv1.Backend{{Address: "10.0.0.2:80", PacketsIn: 1 << 60}}
	return s, nil
}

func (f *fake) Conditions() []condition.Condition {
	return []condition.Condition{{Code: condition.NoBackend, Subject: "web", Since: time.Unix(1, 0)}}
}

func (f *fake) Overrides() (Overrides, error) {
	if f.balancesNothing {
		return nil, ErrNoBalancer
	}
	return overrides{f}, nil
}

// overrides are the fake's balancer.
type overrides struct{ *fake }

func (overrides) Overrides() []*shuntv1.Override {
	return []*shuntv1.Override{{Backend: "10.0.0.2:80", Kind: KindWeight, Weight: proto.Uint32(3)}}
}

func (f *fake) Reload(ctx context.Context) (*shuntv1.ReloadResponse, error) {
	f.mu.Lock()
	f.reloads++
	f.mu.Unlock()
	if f.block != nil {
		f.entered <- struct{}{}
		select {
		case <-f.block:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return &shuntv1.ReloadResponse{Applied: true, Difference: &shuntv1.Difference{Repairs: 2}, Text: "two"}, nil
}

func (f *fake) Plan(context.Context) (*shuntv1.ReloadResponse, error) {
	return &shuntv1.ReloadResponse{Planned: true, Text: "three"}, nil
}

func (f *fake) Override(_ context.Context, selector string, o Override) (*shuntv1.OverrideResponse, error) {
	switch selector {
	case "nobody":
		return nil, SelectorError{Err: errors.New("no backend has this name: `shunt backend list` shows them")}
	case "two":
		return nil, SelectorError{Err: errors.New("two have this name"), Ambiguous: true}
	case "stopping":
		return nil, ErrStopping
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, o)
	return &shuntv1.OverrideResponse{Backends: []string{selector}, Text: "done", Unsaved: "the disk is full"}, nil
}

func (f *fake) ClearOverrides(_ context.Context, selector string, kinds []string, _ Author) (*shuntv1.OverrideResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cleared = append(f.cleared, fmt.Sprint(selector, kinds))
	return &shuntv1.OverrideResponse{Backends: []string{selector}}, nil
}

// Detach waits as a daemon that has to remove much: for block, after its server has stopped.
func (f *fake) Detach(_ context.Context, instance string, a Author) error {
	switch {
	case instance != "default":
		return fmt.Errorf("%w: this is %q", ErrOtherInstance, "default")
	case a.Client != "shunt":
		return fmt.Errorf("%w by %s", ErrStopping, a.Client)
	}
	f.entered <- struct{}{}
	<-f.block
	return nil
}

// serve is a server in a folder of its own.
func serve(t testing.TB, f *fake) (path string, events *Events) {
	t.Helper()
	path, events = filepath.Join(t.TempDir(), "shunt.sock"), &Events{}
	newServer(t, path, f, events)
	return path, events
}

// newServer serves until the test ends.
func newServer(t testing.TB, path string, f *fake, events *Events) *Server {
	t.Helper()
	s := &Server{Instance: "default", API: settings.API{Socket: path}, Handler: f, Events: events, Log: slog.New(slog.DiscardHandler)}
	if err := s.Listen(context.Background()); err != nil {
		t.Fatal(err)
	}
	s.Serve()
	t.Cleanup(func() {
		s.Stop()
		for _, path := range []string{path, ReadSocket(path)} {
			if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("after the end %s is still there: %v", path, err)
			}
		}
		s.Wait()
	})
	return s
}

func httpClient(path string) *http.Client {
	return &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}}}
}

// post sends a request as curl does.
func post(t testing.TB, path, procedure, kind, body string) (status int, answer string) {
	t.Helper()
	r, err := http.NewRequest(http.MethodPost, "http://shunt/shunt.v1."+procedure, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", kind)
	r.Header.Set("User-Agent", "curl/8")
	response, err := httpClient(path).Do(r)
	if err != nil {
		t.Fatalf("%s: %v", procedure, err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(text)
}

const (
	jsonType = "application/json"
	formType = "application/x-www-form-urlencoded"
)

// TestRequests asks as curl does: the answer names the fault and its field.
func TestRequests(t *testing.T) {
	f := &fake{}
	path, _ := serve(t, f)
	for _, c := range []struct {
		procedure, kind, body string
		status                int
		says                  string
	}{
		{"ControlService/SetBackendWeight", jsonType, `{"backend": "10.0.0.2", "weight": 7}`, 200, `"unsaved":"the disk is full"`},
		{"ControlService/SetBackendWeight", formType, `{"backend": "10.0.0.2", "weight": 0}`, 200, `"backends":["10.0.0.2"]`},
		{"ControlService/SetBackendWeight", jsonType, `{"backend": "10.0.0.2", "weight": 70000}`, 400, "weight: 70000 is above 65535"},
		{"ControlService/SetBackendWeight", jsonType, `{"backend": "10.0.0.2", "weight": -1}`, 400, "weight: -1"},
		{"ControlService/SetBackendWeight", jsonType, `{"backend": "10.0.0.2", "weight": "many"}`, 400, "weight"},
		{"ControlService/SetBackendWeight", jsonType, `{"backend": "10.0.0.2"}`, 400, "weight: is missing"},
		{"ControlService/SetBackendWeight", jsonType, `{"weight": 1}`, 400, "backend: is missing"},
		{"ControlService/SetBackendWeight", jsonType, `{"backend": "10.0.0.2", "wieght": 1}`, 400, `unknown field \"wieght\"`},
		{"ControlService/SetBackendWeight", jsonType, `{"backend": "` + strings.Repeat("x", 300) + `", "weight": 1}`, 400, "backend: has 300 bytes"},
		{"ControlService/SetBackendWeight", jsonType, `{"backend": `, 400, "the request's JSON"},
		{"ControlService/SetBackendWeight", jsonType, `[]`, 400, "the request's JSON"},
		{"ControlService/SetBackendWeight", jsonType, strings.Repeat(" ", requestBytesMax+1), 429, "more than 16384 bytes"},
		{"ControlService/SetBackendWeight", jsonType, `{"backend": "nobody", "weight": 1}`, 404, "no backend has this name"},
		{"ControlService/SetBackendWeight", jsonType, `{"backend": "two", "weight": 1}`, 400, "have this name"},
		{"ControlService/SetBackendWeight", jsonType, `{"backend": "stopping", "weight": 1}`, 503, "stopping"},
		{"ControlService/SetBackendHealth", jsonType, `{"backend": "10.0.0.2", "health": "well"}`, 400, `health: \"well\" is none of up, down and auto`},
		{"ControlService/SetBackendHealth", jsonType, `{"backend": "10.0.0.2"}`, 400, "health: is missing"},
		{"ControlService/SetBackendHealth", jsonType, `{"backend": "10.0.0.2", "health": "auto"}`, 200, "10.0.0.2"},
		{"ControlService/DrainBackend", jsonType, `{"backend": "10.0.0.2", "deadline": "90s"}`, 200, "10.0.0.2"},
		{"ControlService/DrainBackend", jsonType, `{"backend": "10.0.0.2", "deadline": "-1s"}`, 400, "deadline: -1s is not in the future"},
		{"ControlService/DrainBackend", jsonType, `{"backend": "10.0.0.2", "deadline": 5}`, 400, "deadline"},
		{"ControlService/UndrainBackend", jsonType, `{"backend": "10.0.0.2"}`, 200, "10.0.0.2"},
		{"ControlService/ClearOverrides", jsonType, `{"backend": "10.0.0.2", "kinds": ["weight", "mood"]}`, 400, `kinds[1]: \"mood\" is none of`},
		{"ControlService/ClearOverrides", jsonType, `{"backend": "10.0.0.2", "all": true}`, 400, "all: cannot be set"},
		{"ControlService/ClearOverrides", jsonType, `{}`, 400, "backend: is missing"},
		{"ControlService/ClearOverrides", jsonType, `{"all": true, "kinds": ["weight"]}`, 200, "backends"},
		{"ControlService/Reload", formType, ``, 200, `"applied":true`},
		{"ControlService/Detach", jsonType, `{}`, 400, "instance: is missing"},
		{"ControlService/Detach", jsonType, `{"instance": "other"}`, 400, "another instance answers"},
		{"ControlService/Detach", jsonType, `{"instance": "default"}`, 503, "stopping by curl/8"},
		{"ControlService/Nothing", jsonType, `{}`, 404, ""},
		{"Nothing/Reload", jsonType, `{}`, 501, "there is no /shunt.v1.Nothing/Reload"},
		{"StatusService/GetStatus", jsonType, `{}`, 200, `"packets_in":1152921504606846976,`},
		{"StatusService/ListBackends", jsonType + "; charset=utf-8", `{}`, 200, `{"backends":[{"address":"10.0.0.2:80"`},
		{"StatusService/ListOverrides", jsonType, `{}`, 200, `"weight":3`},
	} {
		status, answer := post(t, path, c.procedure, c.kind, c.body)
		if status != c.status || !strings.Contains(answer, c.says) || !json.Valid([]byte(answer)) && answer != "404 page not found\n" {
			t.Errorf("%s %.80s: %d %s; want %d and %q", c.procedure, c.body, status, answer, c.status, c.says)
		}
	}
	if response, err := httpClient(path).Get("http://shunt/shunt.v1.StatusService/GetStatus"); err != nil || response.StatusCode != 405 {
		t.Errorf("GET: %v, %v", response, err)
	}
	want := []Override{{Kind: KindWeight, Weight: 7}, {Kind: KindWeight}, {Kind: KindDrain, Deadline: 90 * time.Second}}
	if len(f.asked) != len(want) {
		t.Fatalf("%d overrides reached the daemon, want %d: %+v", len(f.asked), len(want), f.asked)
	}
	for i, o := range f.asked {
		by := o.Author
		o.Author = Author{}
		if o != want[i] || by.UID != uint32(os.Getuid()) || by.Client != "curl/8" || by.By == "" {
			t.Errorf("override %d is %+v by %+v", i, o, by)
		}
	}
	if got := strings.Join(f.cleared, " "); got != "10.0.0.2[health] 10.0.0.2[drain] [weight]" {
		t.Errorf("cleared are %s", got)
	}
}

// TestReadSocket: the socket has the procedures that change nothing, and says where the others are.
func TestReadSocket(t *testing.T) {
	f := &fake{}
	path, _ := serve(t, f)
	read := ReadSocket(path)
	if status, answer := post(t, read, "StatusService/GetStatus", jsonType, "{}"); status != 200 {
		t.Errorf("GetStatus: %d %s", status, answer)
	}
	for _, procedure := range []string{"Reload", "DrainBackend", "UndrainBackend", "SetBackendWeight", "SetBackendHealth", "ClearOverrides"} {
		status, answer := post(t, read, "ControlService/"+procedure, jsonType, `{}`)
		if status != 403 || !strings.Contains(answer, path) {
			t.Errorf("%s: %d %s", procedure, status, answer)
		}
	}
	if f.reloads != 0 {
		t.Error("a reload came through")
	}
	for _, p := range []string{path, read} {
		if info, err := os.Stat(p); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s is %v, %v; want 0600", p, info.Mode(), err)
		}
	}
}

// TestNoBalancer: a node without a balancer refuses requests for overrides, and answers the others.
func TestNoBalancer(t *testing.T) {
	path, _ := serve(t, &fake{balancesNothing: true})
	for procedure, body := range map[string]string{
		"ControlService/DrainBackend": `{"backend": "10.0.0.2"}`, "ControlService/UndrainBackend": `{"backend": "10.0.0.2"}`,
		"ControlService/ClearOverrides": `{"all": true}`, "StatusService/ListOverrides": `{}`,
	} {
		if status, answer := post(t, path, procedure, "application/json", body); status != 400 || !strings.Contains(answer, "failed_precondition") || !strings.Contains(answer, "balances nothing") {
			t.Errorf("%s: %d %s, want that there is no balancer", procedure, status, answer)
		}
	}
	if status, answer := post(t, path, "ControlService/Reload", "application/json", `{}`); status != 200 {
		t.Errorf("a reload: %d %s", status, answer)
	}
}

// TestGroups gives the sockets to groups.
func TestGroups(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("to give files to groups needs root")
	}
	path := filepath.Join(t.TempDir(), "shunt.sock")
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for _, c := range []struct {
		api  settings.API
		says string
	}{
		{settings.API{Socket: path, Group: "no-such-group"}, "groupadd --system no-such-group"},
		{settings.API{Socket: path, ReadGroup: "no-such-group"}, "read_group: no-such-group"},
		{settings.API{Socket: path, Group: "daemon", ReadGroup: "54321"}, ""},
	} {
		err := (&Server{API: c.api, Handler: &fake{}, Log: slog.New(slog.DiscardHandler)}).Listen(ctx)
		if c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) || c.says == "" && err != nil {
			t.Errorf("%+v: %v, want %q", c.api, err, c.says)
		}
		if _, err := os.Stat(path); c.says != "" && err == nil {
			t.Error("a socket is left of a server that did not start")
		}
	}
	for p, gid := range map[string]uint32{path: 1, ReadSocket(path): 54321} { // daemon is group 1 everywhere
		info, err := os.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		if s := info.Sys().(*syscall.Stat_t); s.Gid != gid || s.Uid != 0 || info.Mode().Perm() != 0o660 {
			t.Errorf("%s belongs to %d:%d with mode %s", p, s.Uid, s.Gid, info.Mode())
		}
	}
}

// TestSocketsOfOthers: a dead socket is replaced; a living one and any other file stay.
func TestSocketsOfOthers(t *testing.T) {
	path, _ := serve(t, &fake{})
	again := func() error {
		return (&Server{API: settings.API{Socket: path}, Handler: &fake{}}).Listen(context.Background())
	}
	if err := again(); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d answers there", os.Getpid())) {
		t.Errorf("a second server: %v", err)
	}
	if _, err := NewClient(path).Status(context.Background()); err != nil {
		t.Errorf("after a second server: %v", err)
	}
	folder := t.TempDir()
	file := filepath.Join(folder, "file.sock")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := requireFree(file); err == nil || !strings.Contains(err.Error(), "leaves it alone") {
		t.Errorf("a file in the socket's place: %v", err)
	}
	dead := filepath.Join(folder, "dead.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: dead})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	if err := requireFree(dead); err != nil {
		t.Errorf("a dead socket: %v", err)
	}
	if _, err := os.Stat(dead); err == nil {
		t.Error("the dead socket is still there")
	}
	busy := filepath.Join(folder, "busy.sock") // alive, and its queue is full
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	if err := errors.Join(syscall.Bind(fd, &syscall.SockaddrUnix{Name: busy}), syscall.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	for {
		c, err := net.Dial("unix", busy)
		if err != nil {
			break
		}
		defer c.Close()
	}
	if err := requireFree(busy); err == nil {
		t.Error("a living socket with a full queue was taken for a dead one")
	}
	if _, err := os.Stat(busy); err != nil {
		t.Error("it was removed")
	}
}

// TestClient has the command line's errors.
func TestClient(t *testing.T) {
	path, _ := serve(t, &fake{})
	ctx := context.Background()
	if _, err := NewClient(path).Drain(ctx, &shuntv1.DrainBackendRequest{Backend: "nobody"}); err == nil || !strings.HasPrefix(err.Error(), "no backend has this name") {
		t.Errorf("an unknown backend: %v", err)
	}
	_, err := NewClient(path + "x").Status(ctx)
	if !errors.Is(err, ErrNoDaemon) || !errors.Is(err, ErrNoSocket) {
		t.Errorf("without a socket: %v", err)
	}
	r, err := NewClient(path).Reload(ctx)
	if err != nil || !r.Applied || r.Difference.Repairs != 2 {
		t.Errorf("a reload: %v, %v", r, err)
	}
	s, err := NewClient(ReadSocket(path)).Status(ctx)
	if err != nil || s.Backends[0].PacketsIn != 1<<60 {
		t.Errorf("the status: %v, %v", s, err)
	}
	if _, err := NewClient(ReadSocket(path)).Reload(ctx); err == nil || !strings.Contains(err.Error(), "for reading") {
		t.Errorf("a reload at the socket for reading: %v", err)
	}
}

// TestChangeOutlivesItsClient: a client that stops waiting does not end a change half-way.
func TestChangeOutlivesItsClient(t *testing.T) {
	f := &fake{block: make(chan struct{}), entered: make(chan struct{})}
	path, _ := serve(t, f)
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan error)
	go func() {
		_, err := NewClient(path).Reload(ctx)
		gone <- err
	}()
	<-f.entered
	cancel()
	if err := <-gone; err == nil {
		t.Error("the client was answered")
	}
	select {
	case f.block <- struct{}{}: // it still waits, and was not cancelled
	case <-time.After(10 * time.Second):
		t.Error("the change ended with its client")
	}
}

// TestAnswerOfTheLastChange: a daemon that ends removes its sockets at once, so that another daemon may have
// them, and still answers the client that has asked for the end.
func TestAnswerOfTheLastChange(t *testing.T) {
	f := &fake{block: make(chan struct{}), entered: make(chan struct{})}
	path := filepath.Join(t.TempDir(), "shunt.sock")
	s := newServer(t, path, f, &Events{})
	type answer struct {
		message *shuntv1.DetachResponse
		err     error
	}
	answers := make(chan answer)
	go func() {
		m, err := NewClient(path).Detach(context.Background(), "default")
		answers <- answer{m, err}
	}()
	<-f.entered
	if _, err := NewClient(path).Detach(context.Background(), "other"); !errors.Is(err, ErrOtherInstance) || err.Error() != `another instance answers: this is "default"` {
		t.Errorf("another instance's detaching: %v", err)
	}
	s.Stop()
	newServer(t, path, &fake{}, &Events{}) // the next daemon, at the same sockets
	close(f.block)
	s.Wait()
	if a := <-answers; a.err != nil || a.message.Pid != int32(os.Getpid()) {
		t.Errorf("the answer after the end: %v, %v", a.message, a.err)
	}
}

// TestJSON reads back the JSON that it wrote, and names are those of the schema.
func TestJSON(t *testing.T) {
	weight := uint32(0)
	m := &shuntv1.Override{Backend: "<10.0.0.2>", Kind: "weight", Weight: &weight}
	text, err := JSON(m)
	if want := `{"backend":"<10.0.0.2>","kind":"weight","weight":0,"by":"","uid":0,"client":""}`; string(text) != want || err != nil {
		t.Errorf("%s, %v; want %s", text, err, want)
	}
	if _, err := JSON(&shuntv1.GetStatusResponse{Reasons: map[string]*shuntv1.Count{"b": {}, "a": {Packets: 1}}}); err != nil {
		t.Error(err)
	}
	var buffer bytes.Buffer
	if err := writePlain(&buffer, "a\xffb"); err != nil || !json.Valid(buffer.Bytes()) {
		t.Errorf("text that is not UTF-8: %q, %v", buffer.String(), err)
	}
}

// TestNames pins the JSON of every message: the names, and how each kind of value looks.
func TestNames(t *testing.T) {
	var out bytes.Buffer
	messages := shuntv1.File_v1_shunt_proto.Messages()
	for i := range messages.Len() {
		kind, err := protoregistry.GlobalTypes.FindMessageByName(messages.Get(i).FullName())
		if err != nil {
			t.Fatal(err)
		}
		m := kind.New()
		fill(m)
		text, err := JSON(m.Interface())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&out, "%s ", messages.Get(i).Name())
		if err := json.Indent(&out, text, "", "  "); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		out.WriteByte('\n')
		again := kind.New().Interface() // our JSON can be read, by us and by protobuf's own mapping
		if err := (jsonCodec{}).Unmarshal(text, again); err != nil || !proto.Equal(again, m.Interface()) {
			t.Errorf("%s is read back as %v, %v", text, again, err)
		}
	}
	golden.Require(t, "testdata/names.golden", out.String())
	if t.Failed() {
		t.Log("a name that is in the file is a promise")
	}
}

// fill gives every field a value.
func fill(m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		one := func(v protoreflect.Value) protoreflect.Value {
			if f.Message() != nil && !f.IsMap() {
				fill(v.Message())
				return v
			}
			switch f.Kind() {
			case protoreflect.StringKind:
				return protoreflect.ValueOfString("text")
			case protoreflect.BoolKind:
				return protoreflect.ValueOfBool(true)
			case protoreflect.DoubleKind:
				return protoreflect.ValueOfFloat64(0.5)
			case protoreflect.Int32Kind:
				return protoreflect.ValueOfInt32(7)
			case protoreflect.Int64Kind:
				return protoreflect.ValueOfInt64(7)
			case protoreflect.Uint64Kind:
				return protoreflect.ValueOfUint64(1 << 63)
			}
			return protoreflect.ValueOfUint32(7)
		}
		switch {
		case f.IsMap() && f.MapValue().Kind() == protoreflect.Uint64Kind:
			m.Mutable(f).Map().Set(protoreflect.ValueOfString("text").MapKey(), protoreflect.ValueOfUint64(1<<63))
		case f.IsMap():
			v := m.Mutable(f).Map().NewValue()
			fill(v.Message())
			m.Mutable(f).Map().Set(protoreflect.ValueOfString("text").MapKey(), v)
		case f.IsList() && f.Message() != nil:
			fill(m.Mutable(f).List().AppendMutable().Message())
		case f.IsList():
			m.Mutable(f).List().Append(one(protoreflect.Value{}))
		case f.Message() != nil:
			one(m.Mutable(f))
		default:
			m.Set(f, one(protoreflect.Value{}))
		}
	}
}

// TestMeantForAnother: every request that names an instance is refused by the daemon of any other.
func TestMeantForAnother(t *testing.T) {
	f := &fake{}
	path, _ := serve(t, f)
	ctx := context.Background()
	ask := func(c *Client) []error {
		_, status := c.Status(ctx)
		_, overrides := c.Overrides(ctx)
		_, reload := c.Reload(ctx)
		_, drain := c.Drain(ctx, &shuntv1.DrainBackendRequest{Backend: "10.0.0.2"})
		return []error{status, overrides, reload, drain}
	}
	for _, meant := range []string{"", "default"} {
		for i, err := range ask(NewClient(path).For(meant)) {
			if errors.Is(err, ErrOtherInstance) {
				t.Errorf("request %d for %q: %v", i, meant, err)
			}
		}
	}
	for i, err := range ask(NewClient(path).For("other")) {
		if !errors.Is(err, ErrOtherInstance) || err.Error() != `another instance answers: this is "default", but the request is for "other"; name the socket of that one` {
			t.Errorf("request %d for another instance: %v", i, err)
		}
	}
}

// TestRefusalComesAfterTheRequest: a client that is refused while it still writes gets a broken pipe, and not
// the reason.
func TestRefusalComesAfterTheRequest(t *testing.T) {
	path, _ := serve(t, &fake{})
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	const head = "POST /shunt.v1.StatusService/GetStatus HTTP/1.1\r\nHost: shunt\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\nShunt-Instance: other\r\n\r\n"
	if _, err := c.Write([]byte(head)); err != nil {
		t.Fatal(err)
	}
	answer := make([]byte, 4096)
	_ = c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	if n, err := c.Read(answer); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("before the request's body, the answer is %q, %v", answer[:n], err)
	}
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := c.Write([]byte("{}")); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(answer); err != nil || !strings.Contains(string(answer[:n]), "another instance answers") {
		t.Errorf("the answer is %q, %v", answer[:n], err)
	}
}

// TestProceduresAreDocumented looks for each in the guide.
func TestProceduresAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/guide/api.md")
	if err != nil {
		t.Fatal(err)
	}
	services := shuntv1.File_v1_shunt_proto.Services()
	for i := range services.Len() {
		for m := range services.Get(i).Methods().Len() {
			if name := string(services.Get(i).Methods().Get(m).Name()); !strings.Contains(string(page), "\n| `"+name+"` |") {
				t.Errorf("docs/guide/api.md does not list %s of %s", name, services.Get(i).FullName())
			}
		}
	}
}
