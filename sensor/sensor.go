// Package sensor attaches BPF programs that observe one thing in the kernel, in the best way that the
// running kernel allows.
//
// Kernels differ in the attachments that they allow: some have no kprobes, some refuse trampolines (fentry), some
// changed a tracepoint's arguments. A feature table cannot tell, so a sensor has a ranked list of ways, and Open tries
// them by loading and attaching. The result names the way that worked, the kernel's reasons for refusing the others,
// and the data lost by that way.
//
// The package does not depend on the observed thing: programs and maps are the caller's. It needs CAP_BPF and
// CAP_PERFMON, or CAP_SYS_ADMIN.
package sensor

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"github.com/shunt-lb/shunt/internal/kernel"
)

// Kind is a kind of attachment.
type Kind string

// The kinds, with the kernel versions that brought them. Only a try shows whether a kernel allows one.
const (
	Fentry     Kind = "fentry"     // at a function's entry, by a trampoline; typed arguments (5.5)
	Fexit      Kind = "fexit"      // at its end (5.5)
	Kprobe     Kind = "kprobe"     // at an instruction, by a breakpoint or ftrace; untyped
	TPBTF      Kind = "tp_btf"     // at a tracepoint, with arguments whose types the verifier checks (5.5)
	RawTP      Kind = "raw_tp"     // at a tracepoint, untyped (4.17)
	Tracepoint Kind = "tracepoint" // at a tracepoint's record, by perf; needs tracefs
	Timer      Kind = "perf_event" // at a timer of each CPU, by perf; the target is cpu-clock (4.9)
	Iter       Kind = "iter"       // over objects that exist, once, when it is attached; the target is their kind, as task (5.8)
	Uprobe     Kind = "uprobe"     // at a symbol of a program's file, in Options.Process only (4.17)
	Uretprobe  Kind = "uretprobe"  // at its end (4.17)
)

// Way is one way to attach a sensor.
type Way struct {
	Kind    Kind
	Target  string        // the function, the tracepoint, or the symbol; of the kind Tracepoint: group/name
	Program string        // its name in the collection
	Loses   string        // the data lost by it, compared with the best way; "": none
	Every   time.Duration // of the kind Timer: its period
	File    string        // of the kinds Uprobe and Uretprobe: the file with the symbol; "": Process.Executable
	// Cookie is the result of bpf_get_attach_cookie in the program, for the kinds Kprobe and Uprobe: one program can
	// tell its attachments apart by it (5.15). 0: none.
	Cookie uint64
}

func (w Way) String() string { return string(w.Kind) + " " + w.Target }

// Sensor observes one thing. Its ways are tried in order, and the first that works is kept.
type Sensor struct {
	Name    string
	Watches string // the observed thing, in a few words
	Ways    []Way
	// Without describes the tool without this sensor, if no way works; "": the tool needs it, and Open fails.
	Without string
	// Unless names programs of sensors before this one that observe the same and more. While one of them is attached, no way of
	// this sensor is tried, and it has no Result.
	Unless []string
}

// Refusal is a way that did not work.
type Refusal struct {
	Way    Way
	Reason string // the kernel's, in one line
	Err    error
}

// Result is the outcome of attaching a sensor.
type Result struct {
	Sensor  Sensor
	Got     *Way // nil: no way worked
	Refused []Refusal
}

// String is one line: the way, the data lost by it, and the refused ways.
func (r Result) String() string {
	var b strings.Builder
	b.WriteString(r.Sensor.Name + ": ")
	switch {
	case r.Got == nil:
		b.WriteString("not attached; " + r.Sensor.Without)
	case r.Got.Loses == "":
		b.WriteString(r.Got.String() + ", the best way")
	default:
		b.WriteString(r.Got.String() + ", " + r.Got.Loses)
	}
	for _, f := range r.Refused {
		fmt.Fprintf(&b, "; refused: %v (%s)", f.Way, f.Reason)
	}
	return b.String()
}

// Options are the arguments of Open besides the programs.
type Options struct {
	// Constants are set in the collection before it is loaded, by the name of the variable.
	Constants map[string]any
	// BTF describes the kernel's types; see FindBTF. The zero value stands for the kernel's own.
	BTF BTF
	// Process is for the kinds Uprobe and Uretprobe.
	Process Process
	// Prepare, if not nil, is called when the maps exist and before a program is loaded.
	Prepare func(maps map[string]*ebpf.Map) error
}

// Set holds attached sensors. Close detaches them.
type Set struct {
	Results []Result
	Maps    map[string]*ebpf.Map
	maps    *ebpf.Collection
	held    []held
	gone    map[string]uint64 // by sensor that a Budget has closed: how often it was not run
}

// held is an attached sensor.
type held struct {
	sensor     string
	program    *ebpf.Program
	collection *ebpf.Collection
	link       io.Closer
}

// ErrNoWay is in the error of Open if a sensor that a tool cannot do without has no way. Set.Results is
// complete nevertheless: Open returns a Set with this error, and it has to be closed.
var ErrNoWay = errors.New("the kernel allows no way to attach")

// Open makes the collection's maps, and attaches each sensor in the first of its ways that works. It changes spec's
// constants. With the error ErrNoWay it returns a Set too, for its Results and to be closed.
func Open(spec *ebpf.CollectionSpec, sensors []Sensor, o Options) (*Set, error) {
	if err := privileged(); err != nil {
		return nil, err
	}
	// Kernels before 5.11 count maps against this limit. If raising it fails, later kernels do not care, and on earlier
	// ones making the maps fails with its own reason.
	_ = rlimit.RemoveMemlock()
	for name, value := range o.Constants {
		variable, ok := spec.Variables[name]
		if !ok {
			return nil, fmt.Errorf("set the constant %s: the BPF object has no such variable", name)
		}
		if err := variable.Set(value); err != nil {
			return nil, fmt.Errorf("set the constant %s to %v: %w", name, value, err)
		}
	}
	maps := spec.Copy()
	clear(maps.Programs)
	coll, err := ebpf.NewCollectionWithOptions(maps, o.collection(nil))
	if err != nil {
		return nil, fmt.Errorf("make the maps of the sensors: %w", err)
	}
	s := &Set{maps: coll, Maps: coll.Maps}
	if o.Prepare != nil {
		if err := o.Prepare(s.Maps); err != nil {
			s.Close()
			return nil, err
		}
	}
	var missing []error
	var files kernel.Executables
	for _, sensor := range sensors {
		if s.runs(sensor.Unless) {
			continue
		}
		result := s.attach(spec, sensor, o, &files)
		s.Results = append(s.Results, result)
		if result.Got == nil && sensor.Without == "" {
			missing = append(missing, fmt.Errorf("%w: %v", ErrNoWay, result))
		}
	}
	return s, errors.Join(missing...)
}

// runs reports whether one of the programs is attached.
func (s *Set) runs(programs []string) bool {
	return slices.ContainsFunc(s.Results, func(r Result) bool { return r.Got != nil && slices.Contains(programs, r.Got.Program) })
}

func (o Options) collection(maps map[string]*ebpf.Map) ebpf.CollectionOptions {
	return ebpf.CollectionOptions{MapReplacements: maps, Programs: ebpf.ProgramOptions{KernelTypes: o.BTF.Spec}, Cache: kernel.Types}
}

func (s *Set) attach(spec *ebpf.CollectionSpec, sensor Sensor, o Options, files *kernel.Executables) Result {
	result := Result{Sensor: sensor}
	for _, way := range sensor.Ways {
		coll, l, err := s.try(spec, way, o, files)
		if err != nil {
			result.Refused = append(result.Refused, Refusal{way, reason(way, err), err})
			continue
		}
		s.held = append(s.held, held{sensor.Name, coll.Programs[way.Program], coll, l})
		result.Got = &way
		break
	}
	return result
}

// try loads the way's program alone, over the common maps, and attaches it.
func (s *Set) try(spec *ebpf.CollectionSpec, way Way, o Options, files *kernel.Executables) (*ebpf.Collection, io.Closer, error) {
	one := spec.Copy()
	for name := range one.Programs {
		if name != way.Program {
			delete(one.Programs, name)
		}
	}
	program := one.Programs[way.Program]
	if program == nil {
		return nil, nil, fmt.Errorf("the BPF object has no program %s", way.Program)
	}
	if program.AttachTo != "" {
		program.AttachTo = way.Target
	}
	coll, err := ebpf.NewCollectionWithOptions(one, o.collection(s.Maps))
	if err != nil {
		return nil, nil, err
	}
	l, err := attach(coll.Programs[way.Program], way, o.Process, files)
	if err != nil {
		coll.Close()
		return nil, nil, err
	}
	return coll, l, nil
}

func attach(p *ebpf.Program, way Way, of Process, files *kernel.Executables) (io.Closer, error) {
	switch way.Kind {
	case Fentry, Fexit, TPBTF:
		return kernel.AttachTracing(p, way.Program)
	case RawTP:
		return kernel.AttachRawTracepoint(p, way.Target)
	case Kprobe:
		return kernel.AttachKprobe(p, way.Target, way.Cookie)
	case Tracepoint:
		return kernel.AttachTracepoint(p, way.Target)
	case Timer:
		if way.Target != "cpu-clock" {
			return nil, fmt.Errorf("%q is no timer; cpu-clock is", way.Target)
		}
		return kernel.AttachTimer(p, way.Every)
	case Iter:
		return iterate(p, way)
	case Uprobe, Uretprobe:
		file := cmp.Or(way.File, of.Executable)
		if of.PID <= 0 || file == "" {
			return nil, errors.New("no process is named")
		}
		if way.Kind == Uretprobe {
			return files.AttachUretprobe(p, file, way.Target, of.PID)
		}
		return files.AttachUprobe(p, file, way.Target, of.PID, way.Cookie)
	}
	return nil, fmt.Errorf("%q is no kind of attachment", way.Kind)
}

// iterate runs the program over all objects.
func iterate(p *ebpf.Program, way Way) (io.Closer, error) {
	l, err := kernel.AttachIter(p, way.Program)
	if err != nil {
		return nil, err
	}
	if err := kernel.RunIter(l); err != nil {
		return nil, errors.Join(fmt.Errorf("run %s over each %s: %w", way.Program, way.Target, err), l.Close())
	}
	return l, nil
}

// Missed returns how often the kernel did not run a sensor's program since Open, by the sensor's name, because the
// program was running on that CPU already: an interrupt came in between and did the thing that the program watches.
func (s *Set) Missed() (map[string]uint64, error) {
	missed := map[string]uint64{}
	maps.Copy(missed, s.gone)
	for _, h := range s.held {
		stats, err := h.program.Stats()
		if err != nil {
			return nil, fmt.Errorf("read how often the sensor %s was not run: %w", h.sensor, err)
		}
		missed[h.sensor] = stats.RecursionMisses
	}
	return missed, nil
}

// Detach ends all attachments at the same time: before the kernel frees a uprobe it waits until no CPU runs it, some 80
// ms each (6.18). A program that runs on another CPU may still end its run after that. The maps stay.
func (s *Set) Detach() error {
	errs := make([]error, len(s.held))
	var all sync.WaitGroup
	for i, h := range s.held {
		all.Go(func() {
			errs[i] = h.link.Close()
			h.collection.Close()
		})
	}
	all.Wait()
	s.held = nil
	return errors.Join(errs...)
}

// Close detaches the sensors and closes the maps. Close of a nil Set does nothing.
func (s *Set) Close() error {
	if s == nil {
		return nil
	}
	err := s.Detach()
	s.maps.Close()
	return err
}
