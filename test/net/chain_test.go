package net

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/test/stranger"
)

// TestChain: a filter before and a counter after shunt work in real traffic, outlive the daemon and its successor, and
// go on command. No connection suffers.
func TestChain(t *testing.T) {
	for _, attach := range []string{"native", "generic"} {
		t.Run(attach, func(t *testing.T) { chain(t, attach) })
	}
}

func chain(t *testing.T, attach string) {
	b := newBed(t, lab.Options{Layout: lab.OneArm})
	// UDP port 9 is a service like any other, until a filter drops it.
	b.write(b.file(settings{attach: attach, more: fmt.Sprintf("  - name: discard\n    address: %s\n    port: %d\n    protocol: udp\n    backends:\n      - {address: %s, port: 5353}\n",
		lab.VIP4, stranger.Discard, b.Backends[0].Addr4())}))
	b.start()
	iface := b.Balancer.Interfaces()[0].Name
	chainMap, err := ebpf.LoadPinnedMap("/sys/fs/bpf/shunt/"+b.instance+"/chain-"+iface, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer chainMap.Close()
	folder := "/sys/fs/bpf/" + b.instance + "-pins"
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	count, counted := stranger.Count(t, "count")
	for name, p := range map[string]*ebpf.Program{"filter": stranger.Filter(t, "filter", chainMap), "count": count, "old": stranger.Pass(t, "old")} {
		if err := p.Pin(filepath.Join(folder, name)); err != nil {
			t.Fatal(err)
		}
	}
	chainCommand := func(want int, args ...string) string {
		t.Helper()
		code, out := b.shunt(append([]string{"chain"}, args...)...)
		if code != want {
			t.Errorf("shunt chain %s: exit code %d, want %d\n%s", strings.Join(args, " "), code, want, out)
		}
		return out
	}
	change := func(verb, position string, more ...string) []string {
		return append([]string{verb, "--instance", b.instance, "--interface", iface, "--position", position}, more...)
	}
	discarded := func(want bool, when string) {
		t.Helper()
		err := b.ask(at(lab.VIP4, stranger.Discard), want)
		if (err != nil) != want {
			t.Errorf("%s: a datagram to the filtered port: %v", when, err)
		}
	}

	l := b.begin(t, true)
	sessions := b.open(t, 2)
	discarded(false, "without a filter")
	if out := chainCommand(1, change("set", "after", "--program", folder+"/old")...); !strings.Contains(out, "xdp.frags") {
		t.Errorf("a program for frames in one buffer is refused with:\n%s", out)
	}
	chainCommand(0, change("set", "before", "--program", folder+"/filter")...)
	chainCommand(0, change("set", "after", "--program", folder+"/count")...)
	discarded(true, "with a filter")
	b.goOn(t, "behind a filter", sessions)
	was := counted()
	if _, err := b.Client.Dial(within(t, answerTimeout), "tcp", at(b.Balancer.Addr4(), 1)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a connection to the host behind both programs: %v, want that its kernel refuses it", err)
	}
	if counted() == was {
		t.Error("the program after did not see a packet to the host")
	}
	b.kill()
	discarded(true, "without a daemon")
	b.goOn(t, "behind a filter, without a daemon", sessions)
	b.start("--on-exit", "keep")
	discarded(true, "under a successor")
	b.keep()
	discarded(true, "after --on-exit keep")
	b.start()
	discarded(true, "under another successor")
	b.goOn(t, "behind a filter, under a successor", sessions)

	b.statusShows(t, "the programs before and after", "before filter", "shunt sh_xdp", "after count")
	if out := chainCommand(0, "list", "--instance", b.instance); !strings.Contains(out, "before") || !strings.Contains(out, "filter") {
		t.Errorf("shunt chain list:\n%s", out)
	}
	if out := chainCommand(0, change("clear", "before")...); !strings.Contains(out, `"filter"`) {
		t.Errorf("shunt chain clear:\n%s", out)
	}
	chainCommand(0, change("clear", "after")...)
	discarded(false, "after the filter has gone")
	b.goOn(t, "after the filter has gone", sessions)
	b.statusShows(t, "shunt's program alone")
	l.end(t)

	// With a chain set, `detach` leaves nothing behind.
	chainCommand(0, change("set", "before", "--program", folder+"/filter")...)
	b.kill()
	b.detachesAll(t)
}

// statusShows waits until `shunt status` shows these programs on the interface, in a packet's order; none if shunt's is
// alone.
func (b *bed) statusShows(t *testing.T, when string, wanted ...string) {
	t.Helper()
	eventually(t, 10*time.Second, when, func() error {
		var shown []string
		for _, p := range b.status().Attached[0].Chain {
			shown = append(shown, p.Position+" "+p.Name)
		}
		if !slices.Equal(shown, wanted) {
			return fmt.Errorf("shunt status shows %q, want %q", shown, wanted)
		}
		return nil
	})
}

// detachesAll requires that `shunt detach` leaves no pin of the instance.
func (b *bed) detachesAll(t *testing.T) {
	t.Helper()
	if code, out := b.shunt("detach", "--instance", b.instance); code != 0 {
		t.Errorf("shunt detach: exit code %d\n%s", code, out)
	}
	if _, err := os.Stat("/sys/fs/bpf/shunt/" + b.instance); !os.IsNotExist(err) {
		t.Errorf("after detaching, the folder of the instance: %v", err)
	}
}

// ask sends a datagram; if it expects no answer, it waits less long for one.
func (b *bed) ask(address string, lost bool) error {
	if !lost {
		_, err := b.askUDP(b.Client, address, []byte("who?"))
		return err
	}
	ctx := within(b.t, 300*time.Millisecond)
	_, err := b.Client.AskUDP(ctx, address, []byte("who?"))
	return err
}
