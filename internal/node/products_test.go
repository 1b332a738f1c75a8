package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"weak"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/value"
)

// tinyEntry is the section of a product that does nothing.
type tinyEntry struct {
	config.Mark `json:"-"`
	Speed       config.Number `json:"speed,omitempty" doc:"How fast." min:"1" max:"9" default:"5" example:"3"`
}

// tiny is a product that writes down its own life. A speed of 7 cannot be opened, one of 8 cannot be changed to, and
// one of 9 fails half-way.
type tiny struct {
	name string
	mu   sync.Mutex
	said []string
	well bool // 7 can be opened now

	opening func() // if any, is called when the product opens
	why     error  // if any, is the error with 7
}

func (p *tiny) isWell() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.well
}

func (p *tiny) setWell(well bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.well = well
}

func (p *tiny) say(format string, a ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.said = append(p.said, p.name+" "+fmt.Sprintf(format, a...))
}

func (p *tiny) take() (said []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	said, p.said = p.said, nil
	return said
}

func (p *tiny) product() Product {
	return Product{
		Name: p.name,
		Part: config.NewSection(p.name, "Does nothing.", "{speed: 3}", func(e *tinyEntry, _ *config.Contents) any { return e.Speed.Value }),
		Open: func(_ context.Context, host *Host, settings any) (Instance, error) {
			well := p.isWell()
			if p.opening != nil {
				p.opening()
			}
			if settings == uint64(7) && !well {
				return nil, cmp.Or(p.why, errors.New("7 is too much for this machine"))
			}
			p.say("opens in %s with %d", host.Instance, settings)
			r := &running{tiny: p}
			r.speed.Store(settings.(uint64))
			return r, nil
		},
		Remove: func(instance string, _ *slog.Logger) error { p.say("is removed from %s", instance); return nil },
	}
}

// running is a tiny product that is open.
type running struct {
	*tiny
	speed atomic.Uint64
}

func (r *running) Refuses(settings any) error {
	if settings == uint64(8) {
		return errors.New("8 needs a restart")
	}
	return nil
}

func (r *running) Apply(_ context.Context, settings any) (Difference, error) {
	if _, is := settings.(uint64); !is {
		return Difference{}, errors.New("that is no speed")
	}
	if settings == uint64(9) {
		return Difference{}, errors.New("9 is in force in part, and tried again")
	}
	before := []value.Setting{{Key: r.name + ".speed", Value: fmt.Sprint(r.speed.Load())}}
	after := []value.Setting{{Key: r.name + ".speed", Value: fmt.Sprint(settings)}}
	r.speed.Store(settings.(uint64))
	return Difference{Settings: value.DifferentSettings(before, after)}, nil
}

func (r *running) Status(_ context.Context, s *shuntv1.GetStatusResponse) error {
	s.Daemon.Attachments = append(s.Daemon.Attachments, &shuntv1.Attachment{Interface: r.name})
	return nil
}

func (r *running) Summary() string { return fmt.Sprintf("going at %d", r.speed.Load()) }

func (r *running) Close(keep bool) error { r.say("closes, keep %t", keep); return nil }

func (r *running) Drain() { r.say("drains") }

func (r *running) AwaitDrained(context.Context) { r.say("has drained") }

// bed is a node with two tiny products, and its file.
type bed struct {
	*testing.T
	one, two *tiny
	options  Options
	client   *control.Client
	ended    chan error
	stop     func()
}

func newBed(t *testing.T, text string) *bed {
	if os.Getuid() != 0 {
		t.Skip("a node locks its instance in /run/shunt, which needs root")
	}
	folder := t.TempDir()
	b := &bed{T: t, one: &tiny{name: "one"}, two: &tiny{name: "two"}, ended: make(chan error, 1)}
	b.options = Options{
		Products: []Product{b.one.product(), b.two.product()}, Log: slog.New(slog.DiscardHandler), Instance: fmt.Sprintf("node-test-%d", os.Getpid()),
		ConfigPath: filepath.Join(folder, "shunt.yaml"), Socket: filepath.Join(folder, "shunt.sock"), DrainTimeout: time.Minute,
	}
	b.client = control.NewClient(b.options.Socket)
	b.write(text)
	return b
}

func (b *bed) write(text string) {
	b.Helper()
	if err := os.WriteFile(b.options.ConfigPath, []byte(text), 0o600); err != nil {
		b.Fatal(err)
	}
}

// run starts the node, and returns when it answers.
func (b *bed) run() {
	b.Helper()
	var ctx context.Context
	ctx, b.stop = context.WithCancel(context.Background())
	b.Cleanup(func() {
		if b.stop(); b.ended != nil {
			<-b.ended
		}
	})
	go func() { b.ended <- Run(ctx, b.options) }()
	for {
		if _, err := b.client.Status(ctx); err == nil {
			return
		}
		select {
		case err := <-b.ended:
			b.ended = nil
			b.Fatalf("the node has ended: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
}

// end stops the node, and returns its error.
func (b *bed) end() error {
	b.stop()
	err := <-b.ended
	b.ended = nil
	return err
}

func (b *bed) status() *shuntv1.GetStatusResponse {
	b.Helper()
	s, err := b.client.Status(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	return s
}

// reload applies a file, and returns the node's answer.
func (b *bed) reload(text string) *shuntv1.ReloadResponse {
	b.Helper()
	b.write(text)
	r, err := b.client.Reload(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	return r
}

// requireStates compares the products of the status, and the conditions.
func (b *bed) requireStates(want ...string) {
	b.Helper()
	var have []string
	s := b.status()
	for _, p := range s.Daemon.Products {
		have = append(have, p.Name+": "+p.Does+p.Failed)
	}
	for _, c := range s.Daemon.Conditions {
		have = append(have, c.Code+" "+c.Subject)
	}
	if !slices.Equal(have, want) {
		b.Errorf("the status has %q, want %q", have, want)
	}
}

func (b *bed) requireSaid(want ...string) {
	b.Helper()
	if have := append(b.one.take(), b.two.take()...); !slices.Equal(have, want) {
		b.Errorf("the products did %q, want %q", have, want)
	}
}

// TestProductsComeAndGo: a file with one product's section alone starts, and each reload opens, changes and closes
// products as the file says.
func TestProductsComeAndGo(t *testing.T) {
	b := newBed(t, "two: {speed: 3}\n")
	b.run()
	in := b.options.Instance
	b.requireSaid("two opens in " + in + " with 3")
	b.requireStates("two: going at 3")
	if r := b.reload("two: {speed: 4}\n"); !r.Applied || r.Text != "~ two.speed: 3 -> 4" {
		t.Errorf("a change gave %v", r)
	}
	if r := b.reload("two: {speed: 4}\n"); !r.Applied || r.Text != "nothing to change" {
		t.Errorf("no change gave %v", r)
	}
	if r := b.reload("two: {speed: 4}\none: {}\n"); !r.Applied || r.Text != "+ product one: going at 5" {
		t.Errorf("another product gave %v", r)
	}
	b.requireStates("one: going at 5", "two: going at 4")
	if r := b.reload("one: {}\n"); !r.Applied || r.Text != "- product two" {
		t.Errorf("a product that goes gave %v", r)
	}
	b.requireStates("one: going at 5")
	b.requireSaid("one opens in "+in+" with 5", "two closes, keep false")
	if _, err := b.client.Overrides(context.Background()); err == nil || !strings.Contains(err.Error(), "balances nothing") {
		t.Errorf("overrides without a balancer: %v", err)
	}
	if err := b.end(); err != nil {
		t.Error(err)
	}
	b.requireSaid("one closes, keep false")
}

// TestWhatIsRefusedChangesNothing: faults in one product's section, changes that one cannot make, other
// sockets, and addresses that cannot be opened.
func TestWhatIsRefusedChangesNothing(t *testing.T) {
	b := newBed(t, "one: {speed: 1}\ntwo: {speed: 3}\n")
	b.run()
	for text, says := range map[string]string{
		"one: {speed: 2}\ntwo: {speed: 30}\n":                                        "the file has errors",
		"one: {speed: 2}\ntwo: {sped: 3}\n":                                          "the file has errors",
		"one: {speed: 2}\ntwo: {speed: 8}\n":                                         "8 needs a restart",
		"one: {speed: 2}\ntwo: {speed: 3}\napi: {group: root}\n":                     "api.group from root only to root needs restart",
		"one: {speed: 2}\ntwo: {speed: 3}\nmetrics: {listen: \"192.0.2.99:9470\"}\n": "open metrics.listen, 192.0.2.99:9470",
	} {
		r := b.reload(text)
		if r.Applied || !strings.Contains(r.Refused, says) {
			t.Errorf("%q gave %v, want that it is refused: %s", text, r, says)
		}
		if s := b.status().Daemon.Products; len(s) != 2 || s[0].Does != "going at 1" || s[1].Does != "going at 3" {
			t.Errorf("after %q there is %v", text, s)
		}
	}
	if r := b.reload("one: {speed: 2}\ntwo: {sped: 3}\n"); len(r.Faults) != 1 || r.Faults[0].Line != 2 || r.Faults[0].Column != 7 || r.Faults[0].Suggestion != `did you mean "speed"?` {
		t.Errorf("the faults are %v", r.Faults)
	}
	b.requireStates("one: going at 1", "two: going at 3", condition.ConfigRefused+" "+b.options.ConfigPath)
	if r := b.reload("one: {speed: 2}\ntwo: {speed: 3}\n"); !r.Applied {
		t.Errorf("a good file gave %v", r)
	}
	b.requireStates("one: going at 2", "two: going at 3")
}

// TestFailureEndsNoOther: a product that cannot be opened, or fails in a change, is named, the others
// get their settings, and it is tried again.
func TestFailureEndsNoOther(t *testing.T) {
	b := newBed(t, "one: {speed: 7}\ntwo: {speed: 3}\n")
	b.run()
	b.requireStates("one: 7 is too much for this machine", "two: going at 3", condition.ProductFailed+" one")
	if r := b.reload("one: {speed: 7}\ntwo: {speed: 4}\n"); r.Applied || !strings.Contains(r.Refused, "start the product one, which is tried again: 7 is too much") {
		t.Errorf("a reload gave %v", r)
	}
	b.requireStates("one: 7 is too much for this machine", "two: going at 4", condition.ProductFailed+" one")
	b.one.setWell(true)
	deadline := time.Now().Add(time.Minute)
	for len(b.status().Daemon.Conditions) > 0 && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
	}
	b.requireStates("one: going at 7", "two: going at 4")
	if r := b.reload("one: {speed: 9}\ntwo: {speed: 5}\n"); r.Applied || !strings.Contains(r.Refused, "9 is in force in part") {
		t.Errorf("a change that fails gave %v", r)
	}
	b.requireStates("one: going at 7", "two: going at 5")
	if r := b.reload("two: {speed: 5}\n"); !r.Applied {
		t.Errorf("the end of a product gave %v", r)
	}
	b.requireStates("two: going at 5")
}

// crowded is the error of a product that another one keeps from starting.
type crowded struct{ one *tiny }

func (c crowded) Error() string { return "there is no room" }

func (c crowded) Freed() bool { return c.one.isWell() }

// TestProductMakesRoom: a product that another one has kept from starting starts with the node. A product that fails for another
// reason, or for which there is no room yet, is opened once.
func TestProductMakesRoom(t *testing.T) {
	for name, c := range map[string]struct {
		crowded, frees bool
		tries          int
		said           []string
	}{
		"another product makes room": {true, true, 2, []string{"one opens in here with 7"}},
		"no product makes room":      {true, false, 1, nil},
		"room is not the reason":     {false, true, 1, nil},
	} {
		tries := 0
		one, two := &tiny{name: "one", opening: func() { tries++ }}, &tiny{name: "two"}
		if c.crowded {
			one.why = fmt.Errorf("attach: %w", crowded{one})
		}
		two.opening = func() { one.setWell(c.frees) }
		p := newProducts([]Product{one.product(), two.product()}, &Host{Instance: "here", Conditions: &condition.Set{}, Log: slog.New(slog.DiscardHandler)}, &liveness{})
		if err := p.start(t.Context(), map[string]any{"one": uint64(7), "two": uint64(3)}); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if said := one.take(); tries != c.tries || !slices.Equal(said, c.said) {
			t.Errorf("%s: the product was opened %d times, and did %q; want %d times, and %q", name, tries, said, c.tries, c.said)
		}
	}
}

// TestWatchSeesTheStart: a file that changes after it was read, while products still start, is applied.
func TestWatchSeesTheStart(t *testing.T) {
	b := newBed(t, "one: {speed: 3}\n")
	b.options.Watch = true
	b.one.opening = func() { b.write("one: {speed: 4}\n") }
	b.run()
	for deadline := time.Now().Add(time.Minute); b.status().Daemon.Products[0].Does != "going at 4"; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the status has %v, want the speed of the file that was written meanwhile", b.status().Daemon.Products)
		}
	}
}

// TestNothingStarts: if no product of the file can be opened, the node ends with the reason, and leaves
// no socket.
func TestNothingStarts(t *testing.T) {
	b := newBed(t, "two: {speed: 7}\n")
	if err := Run(context.Background(), b.options); err == nil || !strings.Contains(err.Error(), "7 is too much") {
		t.Errorf("the node ended with %v", err)
	}
	for _, path := range []string{b.options.Socket, control.ReadSocket(b.options.Socket), lockPath(b.options.Instance)} {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
	b.write("two: {speed: 70}\n")
	var faults *FaultsError
	if err := Run(context.Background(), b.options); !errors.As(err, &faults) || len(faults.Faults) != 1 {
		t.Errorf("with a fault the node ended with %v", err)
	}
	b.requireSaid()
}

// TestStartSweeps: a start removes the files of a node that was killed while it wrote them, and no other instance's.
func TestStartSweeps(t *testing.T) {
	b := newBed(t, "one: {}\n")
	t.Setenv("STATE_DIRECTORY", t.TempDir())
	other := filepath.Join(RunDirectory, b.options.Instance+"-other.udp-leases.new")
	half := []string{filepath.Join(RunDirectory, b.options.Instance+".udp-leases.new"), filepath.Join(StateDirectory(), b.options.Instance+".overrides.json.new")}
	if err := os.MkdirAll(RunDirectory, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, path := range append(half, other) {
		if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.Remove(path) })
	}
	b.run()
	for _, path := range half {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
	if _, err := os.Lstat(other); err != nil {
		t.Errorf("another instance's file is gone: %v", err)
	}
}

// TestWaysToEnd: products close in the opposite order, and are told whether their work goes on.
func TestWaysToEnd(t *testing.T) {
	for way, want := range map[OnExit][]string{
		ExitDetach: {"one hears Detaching", "one closes, keep false", "two hears Detaching", "two closes, keep false"},
		ExitKeep:   {"one closes, keep true", "two closes, keep true"},
		ExitDrain:  {"one drains", "one has drained", "one hears Detaching", "one closes, keep false", "two drains", "two has drained", "two hears Detaching", "two closes, keep false"},
	} {
		b := newBed(t, "one: {}\ntwo: {}\n")
		b.options.OnExit = way
		detached := 0
		b.options.Detaching = func() { b.one.say("hears Detaching"); b.two.say("hears Detaching") }
		b.options.Detached = func() error { detached++; return nil }
		b.run()
		b.one.take()
		b.two.take()
		if err := b.end(); err != nil {
			t.Errorf("%s: %v", way, err)
		}
		b.requireSaid(want...)
		if want := map[OnExit]int{ExitDetach: 1, ExitDrain: 1}[way]; detached != want {
			t.Errorf("%s: Detached was called %d times", way, detached)
		}
	}
	b := newBed(t, "one: {}\n")
	b.options.OnExit = ExitKeep
	b.options.Detached = func() error { return errors.New("something is left beside the products") }
	b.run()
	b.one.take()
	if _, err := b.client.Detach(context.Background(), b.options.Instance); err == nil || !strings.Contains(err.Error(), "something is left") {
		t.Errorf("Detached failed, and the one who asked hears %v", err)
	}
	b.requireSaid("one closes, keep false")
	if err := Detach(b.options.Instance, b.options.Products, b.options.Log); err != nil {
		t.Error(err)
	}
	b.requireSaid("one is removed from "+b.options.Instance, "two is removed from "+b.options.Instance)
}

// TestUnnamedProducts: the remains of an earlier node for a product that the file does not name go before any product
// opens.
func TestUnnamedProducts(t *testing.T) {
	of := &tiny{name: "one"}
	one, two, three := of.product(), (&tiny{name: "two"}).product(), (&tiny{name: "three"}).product()
	for _, p := range []*Product{&one, &two} {
		name := p.Name
		p.Unnamed = func(instance string, _ *slog.Logger) error {
			of.say("sees that %s of %s goes", name, instance)
			return errors.New("it does not")
		}
	}
	p := newProducts([]Product{one, two, three}, &Host{Instance: "here", Conditions: &condition.Set{}, Log: slog.New(slog.DiscardHandler)}, &liveness{})
	if err := p.start(t.Context(), map[string]any{"one": uint64(3)}); err != nil {
		t.Fatal(err)
	}
	if said := of.take(); !slices.Equal(said, []string{"one sees that two of here goes", "one opens in here with 3"}) {
		t.Errorf("%q", said)
	}
}

// TestSettingsAreLetGo: the settings of the file are not kept once a product is open.
func TestSettingsAreLetGo(t *testing.T) {
	type large [1 << 20]byte
	one := (&tiny{name: "one"}).product()
	one.Open = func(context.Context, *Host, any) (Instance, error) { return &running{tiny: &tiny{name: "one"}}, nil }
	p := newProducts([]Product{one}, &Host{Conditions: &condition.Set{}, Log: slog.New(slog.DiscardHandler)}, &liveness{})
	for _, into := range []func(named map[string]any) error{
		func(named map[string]any) error { return p.start(t.Context(), named) },
		func(named map[string]any) error {
			_, err := p.apply(t.Context(), named)
			return err
		},
	} {
		named := map[string]any{"one": &large{}}
		weakly := weak.Make(named["one"].(*large))
		if err := into(named); err != nil && !strings.Contains(err.Error(), "no speed") {
			t.Fatal(err)
		}
		runtime.GC()
		if weakly.Value() != nil {
			t.Error("the settings are kept")
		}
		runtime.KeepAlive(named)
	}
}

// TestPartsOfAProduct: a part of a product that goes, or that could not be opened, need not make progress any more.
func TestPartsOfAProduct(t *testing.T) {
	of := &tiny{name: "one"}
	one := of.product()
	open := one.Open
	var beat func(part string)
	one.Open = func(ctx context.Context, host *Host, settings any) (Instance, error) {
		beat = host.Alive
		beat("wheel")
		return open(ctx, host, settings)
	}
	alive := &liveness{limit: -1} // every part that exists has been silent for too long
	p := newProducts([]Product{one}, &Host{Conditions: &condition.Set{}, Log: slog.New(slog.DiscardHandler)}, alive)
	for _, step := range []struct {
		name string
		file map[string]any
		want string
	}{
		{"it is open", map[string]any{"one": uint64(3)}, "wheel"},
		{"it goes", map[string]any{}, ""},
		{"it cannot be opened", map[string]any{"one": uint64(7)}, ""},
		{"it is open again", map[string]any{"one": uint64(3)}, "wheel"},
		{"it gets other settings", map[string]any{"one": uint64(4)}, "wheel"},
		{"it goes again", map[string]any{}, ""},
	} {
		if _, err := p.apply(t.Context(), step.file); err != nil && step.want != "" {
			t.Fatalf("%s: %v", step.name, err)
		}
		if part, _ := alive.stuck(); part != step.want {
			t.Errorf("%s: the part %q makes no progress, want %q", step.name, part, step.want)
		}
	}
	beat("wheel")
	if part, _ := alive.stuck(); part != "" {
		t.Errorf("the part %q of a product that has gone counts", part)
	}
}
