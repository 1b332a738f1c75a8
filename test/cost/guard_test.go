package cost

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/protect"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/test/deed"
)

// operationsFile is the record of the cost of operations under the guard's protection.
const operationsFile = "operations.txt"

const guardFolder = "_guard" // of its pins

// TestMain is the worker's main function, too.
func TestMain(m *testing.M) {
	deed.Work()
	os.Exit(m.Run())
}

// site is a machine on which the guard's programs, counting, protect a folder.
type site struct {
	t        *testing.T
	programs map[string]*counted
	events   *event.Readers        // of denied operations
	workers  map[bool]*deed.Worker // by whether a rule trusts the worker
	folders  map[bool]string       // by whether the folder is protected
}

// newSite lets the product load a policy, then loads the same programs, counting, over its maps, and puts them in place
// of the product's. more are rules beside the rule for the protected folder.
func newSite(t *testing.T, more ...policy.Rule) *site {
	t.Helper()
	stayOnOneCPU(t)
	dir, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	s := &site{t: t, programs: map[string]*counted{}, workers: map[bool]*deed.Worker{}, folders: map[bool]string{false: filepath.Join(dir, "out"), true: filepath.Join(dir, "in")}}
	must(t, errors.Join(deed.Prepare(s.folders[false]), deed.Prepare(s.folders[true])))
	self, err := os.ReadFile("/proc/self/exe")
	must(t, err)
	programs := map[bool]string{false: filepath.Join(dir, "other"), true: filepath.Join(dir, "trusted")}
	for _, path := range programs {
		must(t, os.WriteFile(path, self, 0o755))
	}
	rules := append(more, policy.Rule{Name: "data", Paths: []string{s.folders[true]}, Deny: policy.Operations, Mode: policy.Deny,
		Trust: policy.Trust{Programs: policy.Programs(programs[true])}})
	g, err := protect.Start(kernel.DefaultPinRoot, policy.Policy{Rules: rules}, slog.New(slog.DiscardHandler))
	must(t, err)
	t.Cleanup(func() {
		g.Close()
		if _, err := protect.Stop(kernel.DefaultPinRoot); err != nil {
			t.Error(err)
		}
	})
	s.replace()
	for isTrusted, path := range programs {
		w, err := deed.Start(path, 0)
		must(t, err)
		t.Cleanup(func() {
			if err := w.Close(); err != nil {
				t.Error(err)
			}
		})
		s.workers[isTrusted] = w
	}
	return s
}

// stayOnOneCPU puts all threads, and their children, on one CPU: counters are not atomic.
func stayOnOneCPU(t *testing.T) {
	t.Helper()
	var all, one unix.CPUSet
	must(t, unix.SchedGetaffinity(0, &all))
	for cpu := range 1024 {
		if all.IsSet(cpu) {
			one.Set(cpu)
			break
		}
	}
	set := func(to unix.CPUSet) {
		threads, err := os.ReadDir("/proc/self/task")
		must(t, err)
		for _, thread := range threads {
			id, err := strconv.Atoi(thread.Name())
			must(t, err)
			if err := unix.SchedSetaffinity(id, &to); err != nil && !errors.Is(err, unix.ESRCH) {
				t.Fatal(err)
			}
		}
	}
	set(one)
	t.Cleanup(func() { set(all) })
}

// replace attaches counting programs at the hooks of the product's programs, and detaches those.
func (s *site) replace() {
	t := s.t
	t.Helper()
	home := kernel.Directory(kernel.DefaultPinRoot, guardFolder)
	links, err := filepath.Glob(filepath.Join(home, "links", "*", "sh_*"))
	must(t, err)
	spec, err := ebpf.LoadCollectionSpec("../../internal/guard/protect/guard_bpfel.o")
	must(t, err)
	has := func(program string) bool {
		return slices.ContainsFunc(links, func(path string) bool { return filepath.Base(path) == program })
	}
	for name := range spec.Programs {
		if !has(name) {
			delete(spec.Programs, name)
			continue
		}
		s.programs[name], err = count(spec, name)
		must(t, err)
	}
	pinned := map[string]*ebpf.Map{}
	files, err := filepath.Glob(filepath.Join(home, "abi-*", "sh_*"))
	must(t, err)
	for _, file := range files {
		m, err := ebpf.LoadPinnedMap(file, nil)
		must(t, err)
		defer m.Close() //nolint:errcheck,gocritic // the programs hold it
		pinned[filepath.Base(file)] = m
	}
	coll, err := kernel.Load(spec, nil, pinned)
	if err != nil {
		t.Fatalf("loading the guard's programs so that they count: %+v", err)
	}
	t.Cleanup(coll.Close)
	s.events, err = event.NewReaders(event.Stream{Events: coll.Maps[event.MapEvents], Sequence: coll.Maps[event.MapSequence]})
	must(t, err)
	t.Cleanup(func() { _, _ = s.events.Close(nil) })
	for name, c := range s.programs {
		c.take(coll, name)
		attach := kernel.AttachLSM
		if c.program.Type() == ebpf.Tracing {
			attach = kernel.AttachTracing
		}
		l, err := attach(c.program, name)
		must(t, err)
		t.Cleanup(func() { _ = l.Close() })
	}
	for _, path := range links {
		remove(t, path)
	}
}

// remove ends a pinned link, and waits until the kernel has freed it.
func remove(t *testing.T, path string) {
	t.Helper()
	l, err := link.LoadPinnedLink(path, nil)
	must(t, err)
	info, err := l.Info()
	must(t, err)
	must(t, errors.Join(os.Remove(path), l.Close()))
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		l, err := link.NewFromID(info.ID)
		if errors.Is(err, os.ErrNotExist) {
			return
		}
		must(t, err)
		_ = l.Close()
		if time.Now().After(end) {
			t.Fatalf("the link of %s is there after a minute", path)
		}
	}
}

// sum counts runs of programs, and their instructions.
type sum struct{ hooks, instructions float64 }

// onceTries limits how often deeds are repeated because the counters contradict each other: counters are not atomic,
// and a process other than the test may run one of the programs on another CPU.
const onceTries = 3

// once counts while a deed is done n times; byHook has the count by program.
func (s *site) once(name string, n int, isTrusted, isInside, denied bool) (byHook map[string]sum) {
	s.t.Helper()
	var err error
	for range onceTries {
		if byHook, err = s.try(name, n, isTrusted, isInside, denied); err == nil {
			return byHook
		}
		s.t.Log(err)
	}
	s.t.Fatalf("%d times in turn: %v", onceTries, err)
	return nil
}

// try counts as once does, and returns the contradiction, if there is one.
func (s *site) try(name string, n int, isTrusted, isInside, denied bool) (byHook map[string]sum, err error) {
	s.t.Helper()
	for _, c := range s.programs {
		must(s.t, c.begin(0, 0))
	}
	if _, err := s.workers[isTrusted].Do(name, n, s.folders[isInside], denied); err != nil {
		s.t.Fatal(err)
	}
	s.read(n, denied)
	byHook = map[string]sum{}
	for program, c := range s.programs {
		must(s.t, c.counts.Lookup(uint32(0), &c.words))
		if c.words[wordFirst] == 0 || program == "sh_bpf" { // it was not run, or the test itself ran it when it asked for counts
			continue
		}
		got, err := c.end()
		if err != nil {
			return nil, fmt.Errorf("%s, after %d times %s: %w", program, n, name, err)
		}
		byHook[program] = sum{float64(c.times[0]), float64(got.instructions)}
	}
	return byHook, nil
}

// read takes the events of n attempts, so that there is room for the next ones.
func (s *site) read(n int, denied bool) {
	s.t.Helper()
	told := 0
	for {
		e, err := s.events.Read(time.Time{})
		if errors.Is(err, event.ErrTimeout) {
			break
		}
		must(s.t, err)
		if names := folderNames(s.folders[true]); !bytes.Contains(e.Payload, names) {
			s.t.Errorf("an event has not the names %q: %q", names, e.Payload)
		}
		told++
	}
	if lost := s.events.By()[0].Lost; denied && told != n || lost > 0 {
		s.t.Fatalf("of %d attempts %d were told, and %d are lost: it counts what a full buffer costs", n, told, lost)
	}
}

// folderNames are the names of a folder and the one above, as an event has them.
func folderNames(folder string) []byte {
	return []byte("\x00" + filepath.Base(folder) + "\x00" + filepath.Base(filepath.Dir(folder)) + "\x00")
}

// Deeds are done a few times, and some more: the cost of begin and end alone is in both counts. All events of one count
// fit into the buffer.
const few, more = 10, 60

// rounds is the number of comparisons. Other processes run too, and the kernel's deferred work falls into other counts,
// so the median is reported.
const rounds = 3

// measure returns the counts for one deed.
func (s *site) measure(name string, isTrusted, isInside, denied bool) (total sum, byHook map[string]sum) {
	s.t.Helper()
	s.once(name, few, isTrusted, isInside, denied) // labels are looked up, caches are filled
	all := map[string][]sum{}
	for range rounds {
		before, after := s.once(name, few, isTrusted, isInside, denied), s.once(name, more, isTrusted, isInside, denied)
		for program := range s.programs {
			all[program] = append(all[program], sum{(after[program].hooks - before[program].hooks) / (more - few), (after[program].instructions - before[program].instructions) / (more - few)})
		}
	}
	byHook = map[string]sum{}
	for program, each := range all {
		middle := sum{median(each, func(s sum) float64 { return s.hooks }), median(each, func(s sum) float64 { return s.instructions })}
		if middle.hooks < 0.5 { // other processes' runs
			continue
		}
		byHook[program] = middle
		total.hooks += middle.hooks
		total.instructions += middle.instructions
	}
	return total, byHook
}

func median(all []sum, of func(sum) float64) float64 {
	values := make([]float64, len(all))
	for i, one := range all {
		values[i] = of(one)
	}
	slices.Sort(values)
	return math.Round(values[len(values)/2])
}

// recordedFirst is the kernel to compare with if the record has no line for the running one.
const recordedFirst = "6.1"

// sites are the places of deeds, with the trust in their worker, the expected outcome, and the rules beside the rule for
// the protected folder.
var sites = []struct {
	name                        string
	isTrusted, isInside, denied bool
	rules                       string
}{
	{name: "outside"},
	{name: "trusted", isTrusted: true, isInside: true},
	{name: "denied", isInside: true, denied: true},
	{name: "processes", rules: "processes"},
}

// besides are rules by their name in sites. The worker is not in the cgroup, which need not exist.
var besides = map[string][]policy.Rule{
	"":          nil,
	"processes": {{Name: "group", Cgroup: "/shunt-cost", Deny: policy.ProcessOperations, Mode: policy.Deny}},
}

// undeniable are deeds that the rule does not forbid, or that need a forbidden one.
var undeniable = []string{"open", "read", "write", "fork", "exec", "connect", "accept"}

// operationSlack is the allowed difference: the kernel's deferred work, and its work for others, is divided among fifty
// deeds.
func operationSlack(n int) int { return max(2, n/50) }

// TestOperationsCostNoMoreUnapproved counts protection's programs that run for an operation, and their instructions,
// and compares with operations.txt. Its lines in the log begin with "operation:"; to approve one, put it into the file.
func TestOperationsCostNoMoreUnapproved(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs")
	}
	if os.Getenv("SHUNT_KERNEL_TEST") != "" {
		_ = unix.Mount("securityfs", "/sys/kernel/security", "securityfs", 0, "")
	} else if err := protect.Enforces(); err != nil {
		t.Skip(err)
	}
	record, err := readOperations()
	must(t, err)
	for _, rules := range slices.Sorted(maps.Keys(besides)) {
		t.Run(cmp.Or(rules, "files"), func(t *testing.T) { checkOperations(t, rules, record) })
	}
}

// checkOperations counts at the sites with these rules, and compares with the record.
func checkOperations(t *testing.T, rules string, record map[string]operation) {
	series := kernelSeries(t)
	s := newSite(t, besides[rules]...)
	for _, at := range sites {
		if at.rules != rules {
			continue
		}
		for _, d := range deed.All {
			if at.denied && slices.Contains(undeniable, d.Name) {
				continue
			}
			total, byHook := s.measure(d.Name, at.isTrusted, at.isInside, at.denied)
			now := operation{int(total.hooks), int(total.instructions)}
			key := series + " " + at.name + " " + d.Name
			t.Logf("operation: %s %v", key, now)
			for _, program := range slices.Sorted(maps.Keys(byHook)) {
				t.Logf("  %s: %.0f runs, %.0f instructions", program, byHook[program].hooks, byHook[program].instructions)
			}
			was, is := record[key]
			if !is { // the programs are the same; kernels differ in which of them run
				was, is = record[recordedFirst+" "+at.name+" "+d.Name]
			}
			if !is || now.hooks > was.hooks || now.instructions > was.instructions+operationSlack(was.instructions) {
				t.Errorf("%s: %v, and %s has %v: if it may cost that, write it there", key, now, operationsFile, was)
			}
		}
	}
}

// operation is the cost of one operation.
type operation struct{ hooks, instructions int }

func (o operation) String() string {
	return fmt.Sprintf("hooks=%d instructions=%d", o.hooks, o.instructions)
}

// readOperations returns the record, by kernel, site and deed.
func readOperations() (map[string]operation, error) {
	text, err := os.ReadFile(operationsFile)
	if err != nil {
		return nil, err
	}
	all := map[string]operation{}
	for number, line := range strings.Split(string(text), "\n") {
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		var series, site, name string
		var o operation
		if _, err := fmt.Sscanf(line, "%s %s %s hooks=%d instructions=%d", &series, &site, &name, &o.hooks, &o.instructions); err != nil {
			return nil, fmt.Errorf("%s:%d: %q: %w", operationsFile, number+1, line, err)
		}
		all[series+" "+site+" "+name] = o
	}
	return all, nil
}

const (
	operationsPage  = "../../docs/reference/guard-cost.md"
	operationsBegin = "<!-- operations of test/cost -->\n"
	operationsEnd   = "<!-- end of operations -->\n"
)

// operationsTable is the record in the form of the page.
func operationsTable(record map[string]operation) string {
	kernels := map[string]bool{}
	for key := range record {
		series, _, _ := strings.Cut(key, " ")
		kernels[series] = true
	}
	var b strings.Builder
	for _, series := range slices.SortedFunc(maps.Keys(kernels), compareSeries) {
		fmt.Fprintf(&b, "\n| Linux %s: programs, instructions |", series)
		for _, at := range sites {
			fmt.Fprintf(&b, " %s |", at.name)
		}
		b.WriteString("\n|---|" + strings.Repeat("---:|", len(sites)) + "\n")
		for _, d := range deed.All {
			fmt.Fprintf(&b, "| %s |", d.Doc)
			for _, at := range sites {
				text := ""
				if o, is := record[series+" "+at.name+" "+d.Name]; is {
					text = fmt.Sprintf("%d, %d", o.hooks, o.instructions)
				}
				fmt.Fprintf(&b, " %s |", text)
			}
			b.WriteString("\n")
		}
	}
	return b.String() + "\n"
}

// TestOperationsPage compares the page with the record; -update writes it.
func TestOperationsPage(t *testing.T) {
	record, err := readOperations()
	must(t, err)
	text, err := os.ReadFile(operationsPage)
	must(t, err)
	before, rest, has := strings.Cut(string(text), operationsBegin)
	have, after, ends := strings.Cut(rest, operationsEnd)
	if !has || !ends {
		t.Fatalf("%s has no place for the operations", operationsPage)
	}
	want := operationsTable(record)
	if *update {
		must(t, os.WriteFile(operationsPage, []byte(before+operationsBegin+want+operationsEnd+after), 0o644))
		return
	}
	if have != want {
		t.Errorf("%s does not say what %s has; run `go test ./test/cost -run TestOperationsPage -update`", operationsPage, operationsFile)
	}
}
