// Package script tests a configuration's way into the maps as stories: YAML goes in, and an
// exact dump of the maps comes out. Each file in testdata is one story; after an intended
// change, `go test ./test/script -update` writes the new dumps into them.
//
// Commands, besides those of testscript:
//
//	apply FILE           load the file, apply it, print the difference
//	plan FILE            load the file, print the changes that apply would make
//	dump [FILE]          print the maps; with FILE wait until they are like it, and print
//	                     them either way, so that cmp shows the differences
//	restart              forget everything but the maps, as a killed daemon does
//	host-own ADDRESS...  these addresses are the host's own from now on
//	fault KIND N PREFIX  the N-th operation from now that begins with PREFIX fails: before
//	                     it is carried out, after it, or half-way; "fault none" ends that
//	                     it is carried out, after it, or half-way; "fault none" ends that
package script

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/lb/reconcile/fake"
	"github.com/shunt-lb/shunt/internal/lb/source/file"
)

var update = flag.Bool("update", false, "write the dumps that differ into the scripts")

// dumpTimeout bounds dump's wait for the wanted contents of the maps.
const dumpTimeout = 5 * time.Second

// openMaps makes the maps a story plays on, of the sizes in its first configuration.
type openMaps func(limits model.Limits) (reconcile.Maps, error)

// story is the state of one running script.
type story struct {
	open       openMaps
	maps       reconcile.Maps
	reconciler *reconcile.Reconciler
	hostOwn    map[netip.Addr]bool
}

type storyKey struct{}

func TestScripts(t *testing.T) {
	run(t, func(limits model.Limits) (reconcile.Maps, error) { return fake.New(limits), nil })
}

// run plays all stories on the maps that open makes.
func run(t *testing.T, open openMaps) {
	commands := map[string]func(*story, *testscript.TestScript, []string) error{
		"apply": (*story).apply, "plan": (*story).plan, "dump": (*story).dump,
		"restart": (*story).restart, "host-own": (*story).setHostOwn, "fault": (*story).fault,
	}
	params := testscript.Params{
		Dir:           "testdata",
		UpdateScripts: *update,
		Setup: func(env *testscript.Env) error {
			env.Values[storyKey{}] = &story{open: open}
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){},
	}
	for name, command := range commands {
		params.Cmds[name] = func(ts *testscript.TestScript, neg bool, arguments []string) {
			s := ts.Value(storyKey{}).(*story)
			err := command(s, ts, arguments)
			if err != nil {
				fmt.Fprintln(ts.Stderr(), err)
			}
			switch {
			case err != nil && !neg:
				ts.Fatalf("%s: %v", name, err)
			case err == nil && neg:
				ts.Fatalf("%s succeeded, and should have failed", name)
			}
			if m, ok := s.maps.(*fake.Maps); ok && len(m.Violations) > 0 {
				ts.Fatalf("the order was violated:\n%s", strings.Join(m.Violations, "\n"))
			}
		}
	}
	testscript.Run(t, params)
}

// load reads a configuration, and makes the maps if there are none.
func (s *story) load(ts *testscript.TestScript, arguments []string) (reconcile.Desired, error) {
	if len(arguments) != 1 {
		return reconcile.Desired{}, fmt.Errorf("want one file, got %q", arguments)
	}
	// Faults name the file as the script does.
	path, err := filepath.Rel(mustGetwd(), ts.MkAbs(arguments[0]))
	if err != nil {
		return reconcile.Desired{}, err
	}
	loaded, faults, err := file.Load(path)
	if err != nil {
		return reconcile.Desired{}, err
	}
	for _, fault := range faults {
		fault.File = arguments[0]
		fmt.Fprintln(ts.Stderr(), fault)
	}
	if config.HasErrors(faults) {
		return reconcile.Desired{}, fmt.Errorf("%s has faults", arguments[0])
	}
	if s.maps == nil {
		if s.maps, err = s.open(loaded.Limits); err != nil {
			return reconcile.Desired{}, err
		}
		s.reconciler = reconcile.New(s.maps)
	}
	return reconcile.Desired{
		Services:   model.Shared(loaded.Services),
		NATSources: loaded.SNAT.Addresses,
		HostOwn:    s.hostOwn,
		Limits:     loaded.Limits,
		Settle:     loaded.Timeouts.Settle,
	}, nil
}

func mustGetwd() string {
	directory, err := os.Getwd()
	if err != nil {
		panic(err)
	}
	return directory
}

func (s *story) apply(ts *testscript.TestScript, arguments []string) error {
	desired, err := s.load(ts, arguments)
	if err != nil {
		return err
	}
	difference, err := s.reconciler.Apply(desired)
	if err != nil {
		return err
	}
	fmt.Fprintln(ts.Stdout(), difference)
	return nil
}

func (s *story) plan(ts *testscript.TestScript, arguments []string) error {
	desired, err := s.load(ts, arguments)
	if err != nil {
		return err
	}
	difference, err := s.reconciler.Plan(desired)
	if err != nil {
		return err
	}
	fmt.Fprintln(ts.Stdout(), difference)
	return nil
}

func (s *story) dump(ts *testscript.TestScript, arguments []string) error {
	deadline := time.Now().Add(dumpTimeout)
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	for {
		contents, err := s.maps.Contents()
		if err != nil {
			return err
		}
		text := reconcile.Dump(contents)
		if len(arguments) == 0 || text == ts.ReadFile(arguments[0]) || *update || time.Now().After(deadline) {
			fmt.Fprint(ts.Stdout(), text)
			return nil
		}
		if _, ok := s.maps.(*fake.Maps); ok {
			deadline = time.Now() // no other process changes these maps
		}
		<-look.C
	}
}

func (s *story) restart(*testscript.TestScript, []string) error {
	s.reconciler = reconcile.New(s.maps)
	_, err := s.reconciler.Adopt()
	return err
}

func (s *story) setHostOwn(_ *testscript.TestScript, arguments []string) error {
	s.hostOwn = map[netip.Addr]bool{}
	for _, argument := range arguments {
		address, err := netip.ParseAddr(argument)
		if err != nil {
			return err
		}
		s.hostOwn[address] = true
	}
	return nil
}

func (s *story) fault(ts *testscript.TestScript, arguments []string) error {
	m, ok := s.maps.(*fake.Maps)
	if !ok {
		return fmt.Errorf("these maps do not fail on demand")
	}
	if len(arguments) == 1 && arguments[0] == "none" {
		m.Fault = nil
		return nil
	}
	kinds := map[string]fake.Fault{"before": fake.Before, "after": fake.After, "half": fake.Half}
	if len(arguments) != 3 || kinds[arguments[0]] == fake.None {
		return fmt.Errorf("want before, after or half, a number and a prefix, got %q", arguments)
	}
	left, err := strconv.Atoi(arguments[1])
	if err != nil {
		return err
	}
	m.Fault = func(operation string) fake.Fault {
		if strings.HasPrefix(operation, arguments[2]) {
			if left--; left == 0 {
				return kinds[arguments[0]]
			}
		}
		return fake.None
	}
	return nil
}
