package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/guard/agent"
	"github.com/shunt-lb/shunt/internal/guard/connect"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/test/deed"
)

// arm is one state of the guard, and the process's standing in it.
type arm struct {
	name string
	doc  string
	// policy has %IN for the folder of its rules, %TRUSTED for the program that they trust, and %APP for the program
	// whose connections they are about. Empty: no guard.
	policy string
	// isUnder: a rule is about the process's deeds, and trusts the process.
	isUnder bool
}

const (
	protects = "{protect: [{name: data, paths: [%IN], deny: [write, create, delete, rename, link, chmod, mount], trust: {programs: [%TRUSTED]}, mode: deny}]}"
	decoys   = "{decoys: [{folders: [%IN], action: log}]}"
	denies   = "{connections: [{name: net, program: %APP, deny: [connect, bind], to: [192.0.2.0/24, '[2001:db8::/32]:443'], mode: deny}]}"
)

var arms = []arm{
	{"nothing", "no guard", "", false},
	{"protection", "`protect:` of another folder", protects, false},
	{"protected", "`protect:`, of the folder, by a program that the rule trusts", protects, true},
	{"detection", "`detect: {}`, the built-in rules", "{detect: {}}", false},
	{"decoys", "`decoys:` in the folder, none of which is touched", decoys, true},
	{"connections", "`connections:` of another program", denies, false},
	{"limited", "`connections:` of the program, which deny connect and bind of two prefixes", denies, true},
}

// times is the number of repetitions of a deed in a round: they take some tens of milliseconds.
var times = map[string]int{"open": 20000, "open-write": 20000, "read": 100000, "write": 50000, "create": 5000, "rename": 10000, "fork": 300, "exec": 300, "connect": 30000, "accept": 1000}

// bed is a folder, a cgroup, and two processes in it: one of a program that rules trust and deny connections to, and one of another.
type bed struct {
	dir     string
	cgroup  string
	workers map[bool]*deed.Worker // by arm.isUnder
	clean   []func() error
}

func newBed() (b *bed, err error) {
	b = &bed{workers: map[bool]*deed.Worker{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	dir, err := os.MkdirTemp("", "shunt-guard-")
	if err != nil {
		return b, err
	}
	b.clean = append(b.clean, func() error { return os.RemoveAll(dir) })
	if b.dir, err = filepath.EvalSymlinks(dir); err != nil {
		return b, err
	}
	// In memory: a disk's journal has its own time.
	if err := unix.Mount("tmpfs", b.dir, "tmpfs", 0, "mode=755"); err != nil {
		return b, fmt.Errorf("mount a file system on %s: %w", b.dir, err)
	}
	b.clean = append(b.clean, func() error { return unix.Unmount(b.dir, 0) })
	cgroup, remove, err := lab.MakeCgroup(fmt.Sprintf("shunt-bench-guard-%d", os.Getpid()))
	if err != nil {
		return b, err
	}
	b.cgroup, b.clean = cgroup, append(b.clean, remove)
	group, err := os.Open(cgroup)
	if err != nil {
		return b, err
	}
	defer group.Close() //nolint:errcheck // only looked at
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return b, err
	}
	for isUnder, program := range map[bool]string{false: "other", true: "app"} {
		if err := errors.Join(os.WriteFile(filepath.Join(b.dir, program), self, 0o755), deed.Prepare(b.folder(isUnder)), os.MkdirAll(filepath.Join(b.dir, "bpf"), 0o700)); err != nil {
			return b, err
		}
		w, err := deed.Start(filepath.Join(b.dir, program), group.Fd())
		if err != nil {
			return b, err
		}
		b.workers[isUnder], b.clean = w, append(b.clean, w.Close)
	}
	b.clean = append(b.clean, b.stop)
	return b, nil
}

// folder is the folder of the rules, or another one.
func (b *bed) folder(isUnder bool) string {
	if isUnder {
		return filepath.Join(b.dir, "in")
	}
	return filepath.Join(b.dir, "out")
}

// stop removes from the kernel the objects that outlive an agent.
func (b *bed) stop() error {
	root := filepath.Join(b.dir, "bpf")
	_, err1 := protect.Stop(root)
	_, err2 := connect.Stop(root)
	err3 := unix.Unmount(root, 0)
	if errors.Is(err3, unix.EINVAL) { // nothing was mounted
		err3 = nil
	}
	return errors.Join(err1, err2, err3)
}

func (b *bed) close() (err error) {
	for i := len(b.clean) - 1; i >= 0; i-- {
		err = errors.Join(err, b.clean[i]())
	}
	return err
}

// begin has a policy in force, until end is called.
func (b *bed) begin(text string) (end func() error, err error) {
	if text == "" {
		return func() error { return nil }, nil
	}
	_, end, err = b.start(text)
	return end, err
}

// start is begin, with the agent.
func (b *bed) start(text string) (a *agent.Agent, end func() error, err error) {
	file := filepath.Join(b.dir, "guard.yaml")
	text = strings.NewReplacer("%IN", b.folder(true), "%TRUSTED", filepath.Join(b.dir, "app"), "%APP", filepath.Join(b.dir, "app")).Replace(text)
	if err := os.WriteFile(file, []byte("guard: "+text+"\n"), 0o600); err != nil {
		return nil, nil, err
	}
	p, faults, err := policy.Load(file)
	if err != nil {
		return nil, nil, err
	}
	if config.HasErrors(faults) {
		return nil, nil, fmt.Errorf("the policy %s has faults: %v", text, faults)
	}
	a, err = agent.Start(p, agent.Options{Root: filepath.Join(b.dir, "bpf"), Folder: filepath.Join(b.dir, "run"), Decoys: filepath.Join(b.dir, "decoys"), Cgroup: b.cgroup,
		Log: slog.New(slog.DiscardHandler), Say: io.Discard, Tell: func(agent.Line) error { return nil }})
	if err != nil {
		return nil, nil, errors.Join(err, b.stop())
	}
	return a, func() error { return errors.Join(a.Close(), b.stop()) }, nil
}

// report has the results: nanoseconds of CPU for one deed, by arm and deed, of each round.
type report struct {
	rounds, share int // each deed is done one of share times as often
	// In a round each deed is measured in so many separate pieces, and the least counts: other work on the machine only
	// adds. An emulated machine's clock may be as coarse as a piece.
	pieces    int
	without   []string
	onlyWaits bool // of opens that wait
	results   map[string]map[string][]float64
	agents    map[string]map[string][]float64 // the same, of the guard's own process
	waits     map[string]map[string][]float64 // nanoseconds of the clock for one open, by the opened file and the deed, of each round
}

// measure measures all arms, and writes its progress to a writer.
func (r *report) measure(to io.Writer) (err error) {
	b, err := newBed()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.close()) }()
	r.results, r.agents, r.waits = map[string]map[string][]float64{}, map[string]map[string][]float64{}, map[string]map[string][]float64{}
	refused := map[string]bool{}
	for round := range r.rounds {
		for _, text := range policies() {
			if refused[text] || r.onlyWaits {
				continue
			}
			err := r.under(b, text)
			var refusal *protect.Refusal
			if errors.As(err, &refusal) {
				refused[text] = true
				r.without = append(r.without, "protection: "+refusal.Reason)
				continue
			}
			if err != nil {
				return fmt.Errorf("round %d, under %q: %w", round+1, text, err)
			}
		}
		if err := r.waitOnce(b); err != nil {
			return fmt.Errorf("round %d, of opens that wait: %w", round+1, err)
		}
		fmt.Fprintf(to, "%d of %d rounds\n", round+1, r.rounds)
	}
	return nil
}

// policies are the arms' policies, each once.
func policies() (all []string) {
	for _, a := range arms {
		if !slices.Contains(all, a.policy) {
			all = append(all, a.policy)
		}
	}
	return all
}

// under measures the arms of a policy.
func (r *report) under(b *bed, text string) error {
	end, err := b.begin(text)
	if err != nil {
		return err
	}
	for _, a := range arms {
		if a.policy == text && err == nil {
			err = r.one(b, a)
		}
	}
	return errors.Join(err, end())
}

// one measures all deeds under an arm.
func (r *report) one(b *bed, a arm) error {
	if r.results[a.name] == nil {
		r.results[a.name], r.agents[a.name] = map[string][]float64{}, map[string][]float64{}
	}
	for _, d := range deed.All {
		n := max(times[d.Name]/r.share/r.pieces, 2)
		w, folder := b.workers[a.isUnder], b.folder(a.isUnder)
		if _, err := w.Do(d.Name, 2, folder, false); err != nil { // caches are filled
			return err
		}
		before, least := ownTime(), time.Duration(math.MaxInt64)
		for range r.pieces {
			took, err := w.Do(d.Name, n, folder, false)
			if err != nil {
				return err
			}
			least = min(least, took)
		}
		r.results[a.name][d.Name] = append(r.results[a.name][d.Name], float64(least.Nanoseconds())/float64(n))
		r.agents[a.name][d.Name] = append(r.agents[a.name][d.Name], float64((ownTime()-before).Nanoseconds())/float64(n*r.pieces))
	}
	return nil
}

// ownTime is the CPU time of this process, in which the guard is.
func ownTime() time.Duration {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &now) // cannot fail with this clock
	return time.Duration(now.Nano())
}
