package realserver

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/lab"
)

var labs atomic.Int64

// inServer runs a test in a namespace of its own that has eth0, whose settings are all 0.
func inServer(t *testing.T, test func(h *lab.Host) error) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes a network namespace")
	}
	l, err := lab.New(fmt.Sprintf("b%dx%d", os.Getpid(), labs.Add(1)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	server, err1 := l.AddHost("server")
	other, err2 := l.AddHost("other")
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	if err := l.Connect(lab.End{Host: server, Interface: "eth0", IPv4: netip.MustParsePrefix("10.0.0.20/24")}, lab.End{Host: other, Interface: "eth0"}, lab.Cable{}); err != nil {
		t.Fatal(err)
	}
	for _, device := range []string{"all", "eth0"} {
		for _, name := range []string{"arp_ignore", "arp_announce", "rp_filter"} {
			if err := server.SetSysctl("net.ipv4.conf."+device+"."+name, "0"); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := server.Run(func() error { return test(server) }); err != nil {
		t.Fatal(err)
	}
}

// seen returns everything that Prepare may change.
func seen() (map[string]string, error) {
	all := map[string]string{}
	for _, device := range []string{"all", "eth0"} {
		for _, name := range []string{"arp_ignore", "arp_announce", "rp_filter"} {
			value, err := host.ReadNumber(settingName(device, name))
			if err != nil {
				return nil, err
			}
			all[device+"."+name] = fmt.Sprint(value)
		}
	}
	for _, vip := range []netip.Addr{vip4, vip6} {
		there, err := onLoopback(vip)
		if err != nil {
			return nil, err
		}
		all[vip.String()] = fmt.Sprint(there)
	}
	return all, nil
}

func requireSeen(want map[string]string) error {
	got, err := seen()
	if diff := cmp.Diff(want, got); err == nil && diff != "" {
		err = errors.New("-want +got:\n" + diff)
	}
	return err
}

func nowhere(State) error { return nil }

// A prepared server is fit, and Restore brings back its former state.
func TestPrepareAndRestore(t *testing.T) {
	inServer(t, func(h *lab.Host) error {
		if err := h.SetSysctl("net.ipv4.conf.all.rp_filter", "1"); err != nil {
			return err
		}
		before, err := seen()
		if err != nil {
			return err
		}
		var stored []State
		state, err := Prepare([]string{"eth0"}, []netip.Addr{vip4, vip6}, State{}, func(s State) error {
			stored = append(stored, s)
			return requireSeen(before) // written down before it is done
		})
		if err != nil {
			return err
		}
		if diff := cmp.Diff([]State{state}, stored, cmpopts.EquateComparable(netip.Addr{})); diff != "" {
			t.Errorf("stored (-returned +stored):\n%s", diff)
		}
		if err := requireSeen(map[string]string{"all.arp_ignore": "1", "all.arp_announce": "2", "eth0.arp_ignore": "1", "eth0.arp_announce": "2",
			"all.rp_filter": "1", "eth0.rp_filter": "2", vip4.String(): "true", vip6.String(): "true"}); err != nil {
			return err
		}
		again, err := Prepare([]string{"eth0"}, []netip.Addr{vip4, vip6}, state, nowhere)
		if diff := cmp.Diff(state, again, cmpopts.EquateComparable(netip.Addr{})); err != nil || diff != "" {
			t.Errorf("a second time: %v, %s", err, diff)
		}
		left, err := again.Restore()
		if err != nil || !left.IsZero() {
			return fmt.Errorf("left %v: %w", left, err)
		}
		return requireSeen(before)
	})
}

// Restore keeps addresses that were there before, and settings that another program has changed since.
func TestRestoreLeavesWhatIsNotOurs(t *testing.T) {
	inServer(t, func(h *lab.Host) error {
		if err := errors.Join(addVIP(vip4), h.SetSysctl("net.ipv4.conf.all.arp_ignore", "2")); err != nil {
			return err
		}
		state, err := Prepare([]string{"eth0"}, []netip.Addr{vip4, vip6}, State{}, nowhere)
		if err != nil {
			return err
		}
		if err := errors.Join(removeVIP(vip6), h.SetSysctl("net.ipv4.conf.eth0.arp_announce", "1")); err != nil {
			return err
		}
		if left, err := state.Restore(); err != nil || !left.IsZero() {
			return fmt.Errorf("left %v: %w", left, err)
		}
		return requireSeen(map[string]string{"all.arp_ignore": "2", "all.arp_announce": "0", "eth0.arp_ignore": "0", "eth0.arp_announce": "1",
			"all.rp_filter": "0", "eth0.rp_filter": "0", vip4.String(): "true", vip6.String(): "false"})
	})
}

// A start with other VIPs removes the VIPs of the start before.
func TestPrepareTakesBackWhatIsNotWanted(t *testing.T) {
	inServer(t, func(*lab.Host) error {
		before, err := seen()
		if err != nil {
			return err
		}
		first, err := Prepare([]string{"eth0"}, []netip.Addr{vip4}, State{}, nowhere)
		if err != nil {
			return err
		}
		second, err := Prepare([]string{"eth0"}, []netip.Addr{vip6}, first, nowhere)
		if err != nil {
			return err
		}
		now, err := seen()
		if err != nil {
			return err
		}
		if now[vip4.String()] != "false" || now[vip6.String()] != "true" || !slices.Equal(second.Addresses, []netip.Addr{vip6}) {
			t.Errorf("there is %v, and the state is %v", now, second)
		}
		if left, err := second.Restore(); err != nil || !left.IsZero() {
			return fmt.Errorf("left %v: %w", left, err)
		}
		return requireSeen(before)
	})
}

// Prepare changes nothing if it cannot store its state.
func TestPrepareStoresFirst(t *testing.T) {
	inServer(t, func(*lab.Host) error {
		before, err := seen()
		if err != nil {
			return err
		}
		full := errors.New("the disk is full")
		if _, err := Prepare([]string{"eth0"}, []netip.Addr{vip4}, State{}, func(State) error { return full }); !errors.Is(err, full) {
			t.Errorf("the error is %v", err)
		}
		if _, err := Prepare([]string{"eth7"}, []netip.Addr{vip4}, State{}, nowhere); err == nil || !strings.Contains(err.Error(), "eth7") {
			t.Errorf("the error is %v", err)
		}
		return requireSeen(before)
	})
}

// The kernel does not choose the addresses for the host's own connections.
func TestLookSeesThePreparedServer(t *testing.T) {
	inServer(t, func(*lab.Host) error {
		if _, err := Prepare([]string{"eth0"}, []netip.Addr{vip4, vip6}, State{}, nowhere); err != nil {
			return err
		}
		f, err := Look()
		if err != nil {
			return err
		}
		lo, _ := f.link("lo")
		eth0, there := f.link("eth0")
		if !there || !lo.NoARP || eth0.NoARP || !eth0.Up || eth0.MTU != 1500 || !slices.Contains(lo.Addresses, vip6) {
			t.Errorf("the interfaces are %+v", f.Links)
		}
		if got, want := f.Settings["all"], (Settings{ARPIgnore: 1, ARPAnnounce: 2}); got != want {
			t.Errorf("the settings are %+v, want %+v", got, want)
		}
		var codes []string
		for _, c := range Examine(f, Want{Interface: "eth0", VIPs: []netip.Addr{vip4, vip6}}) {
			codes = append(codes, c.Code)
		}
		if !slices.Equal(codes, []string{NoDefaultRoute, NoDefaultRoute}) {
			t.Errorf("found %v", codes)
		}
		return nil
	})
}

func TestRecord(t *testing.T) {
	directory := filepath.Join(t.TempDir(), "run")
	r, err := OpenRecord(directory, "ns-1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := OpenRecord(directory, "ns-1"); err == nil || !strings.Contains(err.Error(), fmt.Sprint(os.Getpid())) {
		t.Errorf("a second one: %v", err)
	}
	if s, err := r.Read(); err != nil || !s.IsZero() {
		t.Errorf("a fresh record holds %v, %v", s, err)
	}
	want := State{[]netip.Addr{vip4, vip6}, []host.Setting{{Name: "net/ipv4/conf/all/arp_ignore", Before: "0", Set: "1"}}}
	if err := r.Write(want); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.Close(), os.WriteFile(r.Path()+".new", []byte("{"), 0o600)); err != nil { // as a killed process leaves it
		t.Fatal(err)
	}
	if r, err = OpenRecord(directory, "ns-1"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(r.Path() + ".new"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file of a killed process is left: %v", err)
	}
	got, err := r.Read()
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{})); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	if err := errors.Join(os.WriteFile(r.Path(), []byte("{"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Read(); err == nil || !strings.Contains(err.Error(), r.Path()) {
		t.Errorf("a damaged record: %v", err)
	}
	if err := errors.Join(r.Write(State{}), r.Close()); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(directory); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
