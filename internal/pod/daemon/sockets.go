package daemon

import (
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/invopop/jsonschema"
	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/cgroup"
	"github.com/shunt-lb/shunt/internal/condition"
	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/metrics"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/sockets"
	"github.com/shunt-lb/shunt/internal/value"
)

const (
	// shutPatience is the time that pairs may take to read waiting data when they are not wanted any more. Pairs that still
	// have data then stay pinned.
	shutPatience = 2 * time.Second
	// pairsFolder has a folder for each instance, in shunt's of bpffs.
	pairsFolder = "_sockets"
)

// socketsEntry is the section sockets.
type socketsEntry struct {
	config.Mark `json:"-"`
	Cgroups     config.Many[config.Phrase] `json:"cgroups" doc:"Folders of a cgroup2 file system. shunt pairs sockets of the processes in them, and in folders below, that connect or are accepted from then on. Both ends of a connection must be in one of the folders." min:"1" max:"4096" example:"[/sys/fs/cgroup/web]"`
	Ports       config.Many[config.Ports]  `json:"ports,omitempty" doc:"Only connections from or to these ports, or ranges of ports. Without this key: all." example:"[8080, \"9000-9010\"]"`
	Limit       size                       `json:"limit,omitempty" doc:"The bytes that may wait at one end of a connection, from 256KiB to 1GiB. Further data go by TCP." default:"2MiB" example:"2MiB"`
	Unused      config.Many[config.Word]   `json:"unused,omitempty" doc:"The features that no program of these cgroups and ports uses with its sockets. If this kernel breaks a feature of paired sockets that is not in the list, shunt pairs none. blocking: wait in recv(2), as programs with a thread for each connection do; fionread: ask how many bytes can be read (nginx does); splice: move data out of a socket by splice(2), as Go's io.Copy between connections and HAProxy do; oob: urgent data; zerocopy: MSG_ZEROCOPY; waitall: MSG_WAITALL; reset: rely on the reset when the other end closes with unread data; half_close: read on after both ends have ended; ktls: TLS by the kernel (TCP_ULP)." enum:"blocking|fionread|splice|oob|zerocopy|waitall|reset|half_close|ktls" example:"[blocking, fionread, splice, oob, zerocopy, waitall, reset, ktls]"`
}

// size is a number of bytes with a unit.
type size struct {
	config.Mark
	Value uint32
}

var sizeUnits = map[string]uint64{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

func (z *size) Read(s config.Scalar, f *config.Field) *config.Complaint {
	digits := strings.TrimRight(s.Text, "KMGiB")
	unit := sizeUnits[s.Text[len(digits):]]
	n, err := strconv.ParseUint(digits, 10, 32)
	switch {
	case err != nil || unit == 0 || !config.IsDigits(digits):
		return config.Wanted(s, "a size such as 2MiB", "write a whole number and KiB, MiB or GiB")
	case n*unit < sockets.LimitMin || n*unit > sockets.LimitMax:
		return config.Complain(fmt.Sprintf("%s %s is out of range, want 256KiB to 1GiB", f.Name, s.Text), "")
	}
	z.Value = uint32(n * unit)
	return nil
}

// Schema implements config.Leaf.
func (*size) Schema(*config.Field) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: "^[0-9]+(KiB|MiB|GiB)$"}
}

// Describe implements config.Leaf.
func (*size) Describe() string { return "size" }

// socketSettings are the file's settings of sockets; empty without cgroups.
type socketSettings struct {
	cgroups []string
	ports   []value.PortRange
	limit   uint32
	unused  []string
}

// buildSockets reads the settings of sockets.
func (p *parsed) buildSockets(d *document) {
	e := &d.Sockets
	for _, one := range e.Cgroups.Items {
		path := filepath.Clean(one.Value)
		switch {
		case one.Bad:
		case !filepath.IsAbs(one.Value):
			p.faults.Errorf(one.Mark, "begin it with /, as in /sys/fs/cgroup/web", "the path %q is not absolute", one.Value)
		case slices.Contains(p.sockets.cgroups, path):
			p.faults.Errorf(one.Mark, "remove one of them", "cgroup %s is in the list twice", path)
		default:
			p.sockets.cgroups, p.grouped = append(p.sockets.cgroups, path), append(p.grouped, one.Mark)
		}
	}
	if len(p.sockets.cgroups) == 0 {
		return
	}
	for _, one := range e.Ports.Items {
		if !one.Bad && one.Value != value.AnyPort {
			p.sockets.ports = append(p.sockets.ports, one.Value)
		}
	}
	for _, one := range e.Unused.Items {
		p.sockets.unused = append(p.sockets.unused, one.Value)
	}
	p.sockets.limit = e.Limit.Value
}

// checkSockets reports cgroups that this machine does not have.
func (p *parsed) checkSockets(severity config.Severity) {
	for i, path := range p.sockets.cgroups {
		if _, err := cgroup.ID(path); err != nil {
			p.faults.Add(severity, p.grouped[i], fmt.Sprintf("shunt cannot use this machine's cgroup %s: %v", path, err), "`findmnt -t cgroup2` shows where cgroups are mounted; shunt uses a cgroup as soon as it exists")
		}
	}
}

// settings returns a setting for each key.
func (s *socketSettings) settings() []value.Setting {
	if len(s.cgroups) == 0 {
		return nil
	}
	return []value.Setting{
		{Key: "accelerate sockets cgroups", Value: strings.Join(s.cgroups, ", ")},
		{Key: "accelerate sockets ports", Value: s.portsText()},
		{Key: "accelerate sockets limit", Value: fmt.Sprintf("%d KiB", s.limit>>10)},
		{Key: "accelerate sockets unused", Value: strings.Join(s.unused, ", ")},
	}
}

func (s *socketSettings) portsText() string {
	var all []string
	for _, p := range s.ports {
		all = append(all, p.String())
	}
	if len(all) == 0 {
		return "all"
	}
	return strings.Join(all, ", ")
}

func (s *socketSettings) equal(o *socketSettings) bool {
	return slices.Equal(s.cgroups, o.cgroups) && slices.Equal(s.ports, o.ports) && s.limit == o.limit && slices.Equal(s.unused, o.unused)
}

// pairs are the socket pairs of a daemon. No two of its methods may be called at the same time, except drain.
type pairs struct {
	above  string // folder of the folders with pins
	log    *slog.Logger
	wanted socketSettings
	tested bool
	checks []sockets.Check
	open   *sockets.Sockets // nil: why has the reason
	why    string
	folder string          // of open
	past   shortcut.Counts // of the closed ones

	draining sync.WaitGroup
	stop     chan struct{}
}

func newPairs(instance string, log *slog.Logger) *pairs {
	return &pairs{above: pinsOf(instance), log: log, past: shortcut.Counts{}, stop: make(chan struct{})}
}

// pinsOf returns the folder of an instance's folders with pins.
func pinsOf(instance string) string {
	return filepath.Join(kernel.Directory(kernel.DefaultPinRoot, pairsFolder), instance)
}

// LeftPairs returns the folders in which processes have left pairs of sockets, by instance. Product's Remove takes the pairs apart.
func LeftPairs() (map[string]string, error) {
	_, _ = kernel.SharePins() // without it the pins of this process's own mount are looked at
	folders, err := sockets.Left(filepath.Dir(pinsOf("any")))
	left := map[string]string{}
	for _, folder := range folders {
		left[filepath.Base(folder)] = folder
	}
	return left, err
}

// remove implements node.Product: a daemon that has ended leaves only pairs of sockets.
func remove(instance string, log *slog.Logger) error {
	_, _ = kernel.SharePins()
	above := pinsOf(instance)
	folders, err := sockets.Left(filepath.Dir(above))
	if err != nil || !slices.Contains(folders, above) {
		return err
	}
	stay, err := sockets.Drain(above, "", shutPatience)
	if err != nil {
		return fmt.Errorf("take the socket pairs of instance %s apart: %w", instance, err)
	}
	if stay > 0 {
		return unreadError(stay, above)
	}
	log.Info("took socket pairs apart", "instance", instance, "path", above)
	removeFolders(above)
	return nil
}

// unreadError returns the error of pairs that cannot be taken apart without loss.
func unreadError(stay int, folder string) error {
	return fmt.Errorf("%s of pairs cannot leave %s: their programs have not read all data that wait for them, which would be lost; new data go by TCP already; let the programs read or end, and try again", value.Counted(stay, "socket"), folder)
}

// removeFolders removes empty folders of pins, and the empty folders above them.
func removeFolders(above string) {
	for _, folder := range []string{above, filepath.Dir(above), kernel.Home(kernel.DefaultPinRoot)} {
		if os.Remove(folder) != nil {
			return
		}
	}
}

// bring pairs sockets as settings say. If it cannot, the reason is a condition and no error here.
func (p *pairs) bring(s socketSettings) {
	if p.wanted.equal(&s) && (p.open != nil || !p.retry()) {
		return
	}
	p.shut()
	p.wanted, p.why = s, ""
	if len(s.cgroups) == 0 {
		return
	}
	if err := p.start(); err != nil {
		p.why = err.Error()
	}
}

// retry reports whether pairing that has failed may succeed now: the kernel's faults stay, but a missing cgroup may have been made.
func (p *pairs) retry() bool {
	if len(p.wanted.cgroups) == 0 || len(sockets.Bad(p.checks, p.wanted.unused)) > 0 {
		return false
	}
	for _, path := range p.wanted.cgroups {
		if _, err := os.Stat(path); err != nil {
			return false
		}
	}
	return true
}

func (p *pairs) start() (err error) {
	if !p.tested {
		if p.checks, err = sockets.Test(); err != nil {
			return fmt.Errorf("shunt cannot test paired sockets on this kernel: %w", err)
		}
		p.tested = true
	}
	if bad := sockets.Bad(p.checks, p.wanted.unused); len(bad) > 0 {
		return refusal(bad)
	}
	if err := kernel.Mount(kernel.DefaultPinRoot, p.log); err != nil {
		return err
	}
	p.folder = filepath.Join(p.above, strconv.FormatInt(time.Now().UnixNano(), 36))
	p.open, err = sockets.Open(sockets.Options{Cgroups: p.wanted.cgroups, Ports: p.wanted.ports, Limit: p.wanted.limit, Folder: p.folder})
	if err != nil {
		_ = os.RemoveAll(p.folder) // nothing is paired yet
		return err
	}
	p.draining.Go(p.drain(p.folder))
	return nil
}

// refusal names the features that this kernel breaks.
func refusal(bad []sockets.Check) error {
	var names, waivable []string
	must := false
	for _, c := range bad {
		names = append(names, c.Name+" ("+c.Broken+")")
		must = must || c.Must
		if !c.Must {
			waivable = append(waivable, c.Name)
		}
	}
	text := "this kernel breaks " + strings.Join(names, ", ") + " of paired sockets"
	if must {
		return fmt.Errorf("%s, which every program needs: remove sockets from the file", text)
	}
	return fmt.Errorf("%s; if no program of these cgroups and ports uses this, write unused: [%s]", text, strings.Join(append(slices.Clone(waivable), "…"), ", "))
}

// drain takes apart the pairs of earlier processes and settings, until only the folder in use is left.
func (p *pairs) drain(but string) func() {
	return func() {
		for {
			stay, err := sockets.Drain(p.above, but, time.Second)
			if err != nil {
				p.log.Warn("cannot take apart earlier socket pairs, which go on", "error", err)
				return
			}
			if stay == 0 {
				return
			}
			select {
			case <-p.stop:
				return
			case <-time.After(time.Second):
			}
		}
	}
}

// shut takes pairs apart. Sockets that cannot be taken apart in time stay pinned, and lose nothing; stay is their number.
func (p *pairs) shut() (stay int) {
	if p.open == nil {
		return 0
	}
	stay, err := p.open.Shut(shutPatience)
	if counts, countsErr := p.open.Counts(); countsErr == nil {
		p.past.Add(counts)
	}
	if stay > 0 || err != nil {
		p.log.Warn("sockets have not read all data that wait for them: they stay paired and lose nothing, new data go by TCP, and the next `shunt run` takes them apart", "sockets", stay, "folder", p.folder, "error", err)
	}
	if err := p.open.Close(); err != nil {
		p.log.Warn("cannot release socket pairs", "error", err)
	}
	p.open = nil
	return stay
}

// close ends all pairs. Pairs that stay are an error unless keep is set.
func (p *pairs) close(keep bool) error {
	close(p.stop)
	stay := p.shut()
	p.draining.Wait()
	removeFolders(p.above)
	if stay == 0 || keep {
		return nil
	}
	return unreadError(stay, p.above)
}

// counts returns the counts of all pairs since the product began.
func (p *pairs) counts() (shortcut.Counts, error) {
	all := maps.Clone(p.past)
	if p.open == nil {
		return all, nil
	}
	now, err := p.open.Counts()
	all.Add(now)
	return all, err
}

// message returns the part of the status; nil without sockets in the file.
func (p *pairs) message() *shuntv1.SocketPairs {
	if len(p.wanted.cgroups) == 0 {
		return nil
	}
	m := &shuntv1.SocketPairs{Cgroups: p.wanted.cgroups, Limit: uint64(p.wanted.limit), State: "paired", Why: p.why}
	for _, ports := range p.wanted.ports {
		m.Ports = append(m.Ports, ports.String())
	}
	for _, c := range p.checks {
		m.Checks = append(m.Checks, &shuntv1.SocketCheck{Name: c.Name, Must: c.Must, Broken: c.Broken, Waived: slices.Contains(p.wanted.unused, c.Name)})
	}
	if p.open == nil {
		m.State = "refused"
	} else if paired, waiting, err := p.open.Paired(); err == nil {
		m.Paired, m.Waiting = uint64(paired), waiting
	}
	counts, _ := p.counts() // the counts of closed pairs, if those of open ones cannot be read
	m.Counts = countsMessage(counts)
	return m
}

// sample adds the counts to the metrics.
func (p *pairs) sample(s *metrics.Sample) error {
	counts, err := p.counts()
	if err != nil || len(p.wanted.cgroups) == 0 {
		return err
	}
	s.PairsSockets = true
	if p.open != nil {
		paired, _, err := p.open.Paired()
		if err != nil {
			return err
		}
		s.SocketsPaired = uint64(paired)
	}
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		if sockets.IsConnection(name) {
			s.SocketConnections = append(s.SocketConnections, metrics.Count{Of: name, Count: counts[name].Packets})
			continue
		}
		s.SocketMessages = append(s.SocketMessages, metrics.Count{Of: name, Count: counts[name].Packets})
		s.SocketBytes = append(s.SocketBytes, metrics.Count{Of: name, Count: counts[name].Bytes})
	}
	return nil
}

// conditions returns a condition while sockets are wanted and not paired.
func (p *pairs) conditions() []condition.Condition {
	if p.why == "" {
		return nil
	}
	return []condition.Condition{{Subject: "sockets", Text: "no sockets are paired: " + p.why}}
}
