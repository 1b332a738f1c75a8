package net

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/test/stranger"
)

// A filter before and a counter after shunt work in real traffic, outlive the daemon and its
// successor, and go when they are told to. Nobody's connection notices.
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

	requireTimes(t, chainCommand(0, "list", "--instance", b.instance, "--measure", "500ms", "-o", "json"))
	if out := chainCommand(0, "list", "--instance", b.instance); !strings.Contains(out, "before") || !strings.Contains(out, "filter") {
		t.Errorf("shunt chain list:\n%s", out)
	}
	if out := chainCommand(0, change("clear", "before")...); !strings.Contains(out, `"filter"`) {
		t.Errorf("shunt chain clear:\n%s", out)
	}
	chainCommand(0, change("clear", "after")...)
	discarded(false, "after the filter has gone")
	b.goOn(t, "after the filter has gone", sessions)
	if attach == "native" {
		if err := stranger.Slow(t, "slow", chainMap).Pin(folder + "/slow"); err != nil {
			t.Fatal(err)
		}
		chainCommand(0, change("set", "before", "--program", folder+"/slow")...)
		b.statusShowsSlow(t, iface)
		chainCommand(0, change("clear", "before")...)
		b.statusForgetsSlow(t)
	}
	l.end(t)

	// With a chain set, `detach` leaves nothing behind.
	chainCommand(0, change("set", "before", "--program", folder+"/filter")...)
	b.kill()
	b.detachesAll(t)
}

// requireTimes expects the JSON of a chain with a filter and a counter, which was measured with traffic.
func requireTimes(t *testing.T, list string) {
	t.Helper()
	type chained struct {
		Name string
		Time struct {
			Packets uint64
			Time    float64 `json:"ns_per_packet"`
		}
	}
	var all []struct{ Before, Shunt, After *chained }
	if err := json.Unmarshal([]byte(list), &all); err != nil || len(all) != 1 || all[0].Before == nil || all[0].Before.Name != "filter" || all[0].After == nil || all[0].After.Name != "count" {
		t.Errorf("shunt chain list: %v\n%s", err, list)
	} else if before, shunt := all[0].Before.Time, all[0].Shunt.Time; before.Packets < shunt.Packets || shunt.Packets == 0 || before.Time <= 0 || shunt.Time <= 0 {
		t.Errorf("with traffic, these times were measured:\n%s", list)
	}
}

// statusShowsSlow waits until the daemon has measured a slow program, and says so.
func (b *bed) statusShowsSlow(t *testing.T, iface string) {
	t.Helper()
	eventually(t, 30*time.Second, "that the daemon finds a slow program", func() error {
		s := b.status()
		chain := s.Attached[0].Chain
		if len(chain) != 2 || chain[0].Position != "before" || chain[0].Name != "slow" || chain[0].Time < 1000 || chain[1].Position != "shunt" || chain[1].Time <= 0 {
			return fmt.Errorf("shown is %+v", chain)
		}
		if c := s.condition("chained_program_slow"); !strings.HasPrefix(c, `before shunt on `+iface+`: the program "slow"`) {
			return fmt.Errorf("the condition is %q", c)
		}
		return nil
	})
}

// statusForgetsSlow waits until it shows nothing of that.
func (b *bed) statusForgetsSlow(t *testing.T) {
	t.Helper()
	eventually(t, 30*time.Second, "that the slow program is forgotten", func() error {
		s := b.status()
		if c := s.condition("chained_program_slow"); len(s.Attached[0].Chain) > 0 || c != "" {
			return fmt.Errorf("shown is %v, and %q", s.Attached[0].Chain, c)
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

// ask sends a datagram; when no answer is expected, it waits less long for one.
func (b *bed) ask(address string, lost bool) error {
	if !lost {
		_, err := b.askUDP(b.Client, address, []byte("who?"))
		return err
	}
	ctx := within(b.t, 300*time.Millisecond)
	_, err := b.Client.AskUDP(ctx, address, []byte("who?"))
	return err
}
