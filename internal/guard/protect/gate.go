package protect

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/fanotify"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// Gate is protection for kernels without BPF LSM: a program that opens a protected file waits until this process has judged the open.
//
//	open, execute ──► holds, the opener waits ──► a goroutine of its own ──► answer, at the latest after AnswerMax
//	new names in protected folders ──► names ──► labels and marks, before any later open is judged
//
// The protection ends with the process: the kernel then lets all waiting opens go on. The Gate decides by the same policy and the same code as `shunt guard
// explain --policy`; it reads trust from /proc while the opener waits. The reasons are in docs/design/54-without-lsm.md.
type Gate struct {
	options      GateOptions
	holds, names *fanotify.Group
	room         chan struct{} // an element for each waiting open
	ending       chan struct{} // closed when the Gate should end
	wake         int           // eventfd that tells the reader that the Gate should end
	ended        chan struct{} // closed when the reader has ended
	failed       chan error    // has the first failure

	ruling atomic.Pointer[ruling]
	began  time.Time
	counts [gateCounts]atomic.Uint64

	// The reader of opens never takes the mutex: the goroutine that has it may itself wait at an open of a protected folder.
	mutex     sync.Mutex       // of the fields below, and of rulings' objects and labels' marks
	mounts    map[string]int   // a descriptor of each file system
	marked    map[place]string // one of the file's names
	recording bool             // a policy is being read
	recorded  []fresh          // new names since then
}

// GateOptions are limits, and the folder of the note that such protection runs.
type GateOptions struct {
	Folder    string              // of the note, which outlives the process: the agent's folder
	AnswerMax time.Duration       // after it an open goes on, judged or not; 0: AnswerMax
	HangMax   time.Duration       // the kernel ends this process if it has not looked for opens for this long; 0: HangMax
	Tell      func(Attempt) error // called by several goroutines at once

	asked func() // for tests: called before an open is judged
}

// The default limits.
const (
	AnswerMax = 5 * time.Second
	HangMax   = 20 * time.Second
)

// waitMax limits the opens that are judged at once, each with two descriptors; more opens wait in the kernel.
const waitMax = 4096

// Numbers of counts.
const (
	gateDenied  = iota
	gateAudited // allowed, and reported
	gateLate    // allowed, because the judgement took too long
	gateUnsure  // the mode of the open was unknown, so that all operations were judged that the rules forbid
	gateUnread  // new names that could not be read
	gateCounts
)

// ruling is a policy as opens are judged by it.
type ruling struct {
	rules    []policy.Rule
	book     *book
	labels   *labeler        // its maps are of the Gate's mutex
	programs map[place]marks // of executables
}

// fresh is a new name in a folder.
type fresh struct {
	folder fanotify.Handle
	name   string
}

// StartGate makes opens of the policy's files wait, and judges them until Close. The error has a *Refusal if the kernel cannot make opens wait.
func StartGate(p policy.Policy, o GateOptions) (g *Gate, err error) {
	if o.AnswerMax == 0 {
		o.AnswerMax = AnswerMax
	}
	if o.HangMax == 0 {
		o.HangMax = HangMax
	}
	if err := firstNamespaces("/proc/self/ns"); err != nil {
		return nil, err
	}
	g = &Gate{options: o, began: time.Now(), mounts: map[string]int{}, marked: map[place]string{}, room: make(chan struct{}, waitMax),
		ending: make(chan struct{}), ended: make(chan struct{}), failed: make(chan error, 1)}
	if g.holds, err = fanotify.Hold(); err != nil {
		return nil, &Refusal{err.Error(), "Use a kernel with BPF LSM", err}
	}
	if g.names, err = fanotify.Names(unix.FAN_UNLIMITED_QUEUE); err != nil {
		return nil, &Refusal{err.Error(), "Use a kernel with BPF LSM", errors.Join(err, g.holds.Close())}
	}
	if g.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, errors.Join(fmt.Errorf("wait for opens of protected files: %w", err), g.holds.Close(), g.names.Close())
	}
	go g.read() // before a file is marked: this process opens files, too
	if err := g.Apply(p); err != nil {
		return nil, errors.Join(err, g.Close())
	}
	return g, nil
}

// CanHold returns nil if the kernel can make opens wait, or the reason why it cannot.
func CanHold() error {
	g, err := fanotify.Hold()
	if err == nil {
		err = g.Close()
	}
	return err
}

// Apply switches to another policy in one step. If it fails, opens are judged by the policy before.
func (g *Gate) Apply(p policy.Policy) error {
	var next *ruling
	for range replacedTries {
		var err error
		if next, err = g.prepare(p); err != nil {
			return err
		}
		if !next.labels.isReplaced() {
			break
		}
	}
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.ruling.Store(next)
	g.recording = false
	for _, n := range g.recorded {
		g.add(next, n)
	}
	g.recorded = nil
	err := g.learn()
	for at, path := range g.marked { // of the policy before
		if _, is := next.labels.marks[at]; is {
			continue
		}
		delete(g.marked, at)
		g.unmark(at, path)
	}
	return errors.Join(err, g.note(time.Time{}))
}

// prepare reads a policy, and marks its files.
func (g *Gate) prepare(p policy.Policy) (*ruling, error) {
	g.mutex.Lock()
	g.recording, g.recorded = true, nil
	g.mutex.Unlock()
	var unmarked error
	// Events of new names begin before a folder is read, so that no name is missed.
	l, b, err := onPaper(p, func(path string, d fs.DirEntry, _ uint64) {
		if d.IsDir() && unmarked == nil {
			unmarked = g.watch(path)
		}
	})
	if err == nil && unmarked != nil {
		err = unmarked
	}
	g.mutex.Lock()
	defer g.mutex.Unlock()
	r := &ruling{rules: p.Enforced(), book: b, labels: l, programs: map[place]marks{}}
	if err == nil {
		for at, m := range l.marks {
			if m.trusts|m.guards|m.interprets != 0 {
				r.programs[at] = m
			}
		}
		err = g.markAll(r)
	}
	if err != nil {
		g.recording, g.recorded = false, nil
		return nil, err
	}
	return r, nil
}

// newNamesMask are the events of a name that is new in a folder.
const newNamesMask = unix.FAN_CREATE | unix.FAN_MOVED_TO | unix.FAN_ONDIR

// watch makes the kernel report new names in a folder.
func (g *Gate) watch(folder string) error {
	if err := g.names.Mark(unix.FAN_MARK_ADD|unix.FAN_MARK_ONLYDIR, newNamesMask, folder); err != nil {
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
			return nil // it was deleted meanwhile
		}
		return fmt.Errorf("protect %s: its file system does not report new names: %w", folder, err)
	}
	handle, err := fanotify.HandleOf(folder)
	if err != nil {
		return nil //nolint:nilerr // it was deleted meanwhile, or the mark of a file in it will fail with the reason
	}
	g.mutex.Lock()
	defer g.mutex.Unlock()
	return g.mount(handle, folder)
}

// mount keeps a descriptor of a file system, by which its handles are opened.
func (g *Gate) mount(of fanotify.Handle, folder string) error {
	if _, is := g.mounts[of.FileSystem()]; is {
		return nil
	}
	fd, err := unix.Open(folder, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return &fs.PathError{Op: "protect", Path: folder, Err: err}
	}
	g.mounts[of.FileSystem()] = fd
	return nil
}

// markAll makes opens of a ruling's files wait.
func (g *Gate) markAll(r *ruling) error {
	for path, at := range r.labels.paths {
		if err := g.mark(r, at, path); err != nil {
			return err
		}
	}
	for at, o := range r.labels.objects {
		if err := g.mark(r, at, o.name); err != nil {
			return err
		}
	}
	return nil
}

// mark makes opens of one file wait, if a rule forbids any. The mark of a folder also covers the files in it, so that opens of new files wait.
func (g *Gate) mark(r *ruling, at place, path string) error {
	var stat unix.Stat_t
	if err := unix.Lstat(path, &stat); err != nil || at != (place{stat.Dev, stat.Ino}) {
		return nil //nolint:nilerr // it was deleted or moved meanwhile: names has its new name
	}
	mask := r.mask(r.labels.marks[at])
	switch kind := stat.Mode & unix.S_IFMT; {
	case mask == 0 || kind != unix.S_IFREG && kind != unix.S_IFDIR:
		return nil
	case kind == unix.S_IFDIR:
		mask |= unix.FAN_EVENT_ON_CHILD
		if r.forbids(policy.Read)&r.labels.marks[at].rules != 0 {
			mask |= unix.FAN_ONDIR
		}
	}
	if err := g.holds.Mark(unix.FAN_MARK_ADD, mask, path); err != nil {
		return fmt.Errorf("protect %s: the kernel cannot make opens of it wait: %w", path, err)
	}
	g.marked[at] = path
	return nil
}

// allMarks are the events that mark can add.
const allMarks = unix.FAN_OPEN_PERM | unix.FAN_OPEN_EXEC_PERM | unix.FAN_EVENT_ON_CHILD | unix.FAN_ONDIR

// unmark ends the wait for opens of a file. A file that has moved stays marked, which is harmless: its opens are under no rule.
func (g *Gate) unmark(at place, path string) {
	var stat unix.Stat_t
	if unix.Lstat(path, &stat) == nil && at == (place{stat.Dev, stat.Ino}) {
		// The marks may be gone already.
		_ = g.holds.Mark(unix.FAN_MARK_REMOVE, allMarks, path)
		_ = g.names.Mark(unix.FAN_MARK_REMOVE, newNamesMask, path)
	}
}

// forbids returns the rules that forbid an operation.
func (r *ruling) forbids(operation string) uint64 { return r.forbidsOp(operations[operation]) }

func (r *ruling) forbidsOp(op guardGuardOp) uint64 {
	return r.book.masks[op].Denied | r.book.masks[op].Audited
}

// mask returns the events that wait for a file with these marks.
func (r *ruling) mask(m marks) (mask uint64) {
	if m.rules&(r.forbids(policy.Write)|r.forbids(policy.Read)) != 0 || m.trusts&r.forbidsOp(guardGuardOpGUARD_PROGRAM) != 0 {
		mask |= unix.FAN_OPEN_PERM
	}
	if m.rules&r.forbids(policy.Exec) != 0 {
		mask |= unix.FAN_OPEN_EXEC_PERM
	}
	return mask
}

// learn reads the new names that have come. The caller holds the mutex.
func (g *Gate) learn() error {
	r := g.ruling.Load()
	return g.names.Read(func(e fanotify.Event) error {
		e.Records(func(kind fanotify.Kind, handle fanotify.Handle, name string) {
			if kind != fanotify.Name || name == "." {
				return
			}
			n := fresh{handle, name}
			if g.recording {
				g.recorded = append(g.recorded, n)
			}
			if r != nil {
				g.add(r, n)
			}
		})
		return nil
	})
}

// add puts a new name under the rules of its folder. If the file has moved on meanwhile, a later event has its present name.
func (g *Gate) add(r *ruling, n fresh) {
	mount, is := g.mounts[n.folder.FileSystem()]
	if !is {
		return
	}
	fd, err := n.folder.Open(mount)
	if err != nil {
		return // the folder was deleted
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	var folder unix.Stat_t
	if unix.Fstat(fd, &folder) != nil {
		return
	}
	in := r.labels.objects[place{folder.Dev, folder.Ino}]
	if in.rules == 0 {
		return
	}
	begin := fmt.Sprintf("/proc/self/fd/%d", fd)
	err = filepath.WalkDir(filepath.Join(begin, n.name), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if errors.Is(err, os.ErrNotExist) {
				return nil
			}
			return err
		}
		var stat unix.Stat_t
		if err := unix.Lstat(path, &stat); err != nil {
			return nil //nolint:nilerr // it was deleted meanwhile
		}
		if d.IsDir() { // before it is read
			if err := g.names.Mark(unix.FAN_MARK_ADD|unix.FAN_MARK_ONLYDIR, newNamesMask, path); err != nil {
				return err
			}
		}
		at := place{stat.Dev, stat.Ino}
		name := in.name + strings.TrimPrefix(path, begin)
		r.labels.objects[at] = protected{name, r.labels.objects[at].rules | in.rules}
		r.labels.marks[at] = r.labels.marks[at].and(marks{rules: in.rules})
		if err := g.mark(r, at, path); err != nil {
			return err
		}
		if _, is := g.marked[at]; is {
			g.marked[at] = name
		}
		return nil
	})
	if err != nil {
		g.counts[gateUnread].Add(1)
	}
}

// pollTime is how long the reader waits for opens before it looks at the time.
const pollTime = time.Second

// Wait returns when ctx ends, or with the error that stopped the Gate. The caller then calls Close.
func (g *Gate) Wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case err := <-g.failed:
		return err
	}
}

func (g *Gate) fail(err error) {
	if err == nil {
		return
	}
	select {
	case g.failed <- err:
	default: // it has the first failure already
	}
}

// read reads opens, and has each judged, until the Gate should end.
func (g *Gate) read() {
	defer close(g.ended)
	runtime.LockOSThread() // never unlocked: the thread ends with its priority
	_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), gatePriority)
	dog, err := newWatchdog()
	if err != nil {
		g.fail(err)
		return
	}
	var judging sync.WaitGroup
	for {
		select {
		case <-g.ending:
			judging.Wait()
			g.fail(dog.close())
			return
		default:
		}
		if err := g.turn(dog, &judging); err != nil {
			g.fail(err) // the watchdog still runs: waiting opens go on when it, or Close, ends the group
			return
		}
	}
}

// turn reads the opens that wait, or waits for some for a moment.
func (g *Gate) turn(dog *watchdog, judging *sync.WaitGroup) error {
	if err := dog.reset(g.options.HangMax); err != nil {
		return err
	}
	g.beat()
	polled := []unix.PollFd{{Fd: g.holds.FD(), Events: unix.POLLIN}, {Fd: int32(g.wake), Events: unix.POLLIN}}
	if _, err := unix.Poll(polled, int(min(pollTime, g.options.HangMax/4).Milliseconds())); err != nil && !errors.Is(err, unix.EINTR) {
		return fmt.Errorf("wait for opens of protected files: %w", err)
	}
	return g.holds.Read(func(e fanotify.Event) error {
		if e.FD < 0 {
			return nil
		}
		if isOwn(e.PID) { // this process would wait for itself
			_, err := g.holds.Answer(e, false)
			return err
		}
		g.room <- struct{}{}
		judging.Go(func() { g.hold(e) })
		return nil
	})
}

// gatePriority is the priority of the thread that reads opens (nice(2)), because other programs wait for it.
const gatePriority = -15

// isOwn reports whether a thread belongs to this process.
func isOwn(tid int) bool {
	var stat unix.Stat_t
	return unix.Stat(fmt.Sprintf("/proc/self/task/%d", tid), &stat) == nil
}

// hold judges one open, in time.
func (g *Gate) hold(e fanotify.Event) {
	// The judge has a descriptor of its own: the event's is closed by the answer.
	file, err := unix.FcntlInt(uintptr(e.FD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		<-g.room
		_, answered := g.holds.Answer(e, false)
		g.counts[gateLate].Add(1)
		g.fail(answered)
		return
	}
	var once sync.Once
	answer := func(deny bool) (waited bool) {
		once.Do(func() {
			var err error
			waited, err = g.holds.Answer(e, deny)
			g.fail(err)
			<-g.room
		})
		return waited
	}
	late := time.AfterFunc(g.options.AnswerMax, func() {
		if answer(false) {
			g.counts[gateLate].Add(1)
		}
	})
	if g.options.asked != nil {
		g.options.asked()
	}
	attempts, deny, err := g.judge(e, file)
	_ = unix.Close(file) // it was only read
	late.Stop()
	g.fail(err)
	if !answer(deny) {
		return
	}
	for _, a := range attempts {
		g.counts[map[bool]int{true: gateDenied, false: gateAudited}[a.Denied]].Add(1)
		g.fail(g.options.Tell(a))
	}
}

// judge reports whether rules forbid an open.
func (g *Gate) judge(e fanotify.Event, file int) (attempts []Attempt, deny bool, err error) {
	var stat unix.Stat_t
	if err := unix.Fstat(file, &stat); err != nil {
		return nil, false, nil //nolint:nilerr // a file that cannot be identified is under no rule
	}
	r, label, name, err := g.look(place{stat.Dev, stat.Ino})
	if err != nil || label == (marks{}) {
		return nil, false, err
	}
	ops, unsure := r.asks(e, label)
	if unsure {
		g.counts[gateUnsure].Add(1)
	}
	if len(ops) == 0 {
		return nil, false, nil
	}
	has := r.standing(e.PID)
	for _, op := range ops {
		about := label.rules
		if op == guardGuardOpGUARD_PROGRAM {
			about = label.trusts
		}
		switch a := r.book.answer(op, about, has); a.Verdict {
		case Denied, Audited:
			attempts = append(attempts, r.attempt(a, e.PID, name, file))
			deny = deny || a.Verdict == Denied
		}
	}
	return attempts, deny, nil
}

// look returns the ruling in force, and its label and name of a file.
func (g *Gate) look(at place) (r *ruling, label marks, name string, err error) {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	if err := g.learn(); err != nil {
		return nil, marks{}, "", err
	}
	if r = g.ruling.Load(); r == nil {
		return nil, marks{}, "", nil // the first policy is being loaded
	}
	return r, r.labels.marks[at], r.labels.objects[at].name, nil
}

// asks returns the operations of an open that a rule forbids for the file. If the mode of the open is not known for sure, these are all that a rule forbids.
func (r *ruling) asks(e fanotify.Event, label marks) (ops []guardGuardOp, unsure bool) {
	add := func(op guardGuardOp, rules uint64) {
		if rules&r.forbidsOp(op) != 0 {
			ops = append(ops, op)
		}
	}
	if e.Mask&unix.FAN_OPEN_EXEC_PERM != 0 {
		add(guardGuardOpGUARD_EXEC, label.rules)
		return ops, false
	}
	mode := fanotify.ModeOf(e.PID, AnswerMax/2) // a slow machine is no reason to refuse
	if !mode.IsSure {
		mode.Reads, mode.Writes = true, true
	}
	if e.Mask&unix.FAN_ONDIR != 0 { // no open of a folder is for writing
		mode.Writes = false
	}
	if mode.Writes {
		add(guardGuardOpGUARD_WRITE, label.rules)
		add(guardGuardOpGUARD_PROGRAM, label.trusts)
	}
	if mode.Reads {
		add(guardGuardOpGUARD_READ, label.rules)
	}
	return ops, !mode.IsSure && len(ops) > 0
}

// standing returns the present standing of a waiting thread, by the program of its process and, for rules that trust children, by the programs of the
// processes above it. A process whose starter has ended is below the process that adopted it.
func (r *ruling) standing(tid int) standing {
	for range standingTries {
		all := chainOf(tid, r.labels.children != 0)
		l := labeler{marks: r.programs, pids: r.labels.pids, children: r.labels.children, standings: map[int]standing{}}
		if all[tid] == nil {
			return standing{}
		}
		of := l.standing(tid, all, 0)
		if len(all) == 1 || of.trusts == 0 || isSame(all) {
			of.trusts = r.book.narrows.here(of.trusts, tid)
			return of
		}
	}
	return standing{} // the processes above it change too fast to be known
}

// standingTries limits how often the processes above a process are read again because one of them ended meanwhile.
const standingTries = 10

// chainOf returns a thread and the processes above it.
func chainOf(tid int, isAbove bool) map[int]*running {
	all := map[int]*running{}
	for id := tid; id > 0 && len(all) < ancestorsMax; {
		p, err := look(id, nil)
		if p == nil || err != nil {
			break
		}
		all[id] = p
		if !isAbove {
			break
		}
		id = p.parent
	}
	return all
}

// isSame reports whether the processes still run, each below the same process: otherwise a number may have been another process's.
func isSame(all map[int]*running) bool {
	for id, p := range all {
		if parent, key, ok := origin(id); !ok || parent != p.parent || key != p.key {
			return false
		}
	}
	return true
}

// attempt describes a refusal, or an audited open.
func (r *ruling) attempt(a Answer, tid int, path string, file int) Attempt {
	told := Attempt{Time: time.Now(), Denied: a.Verdict == Denied, Operation: a.Operation, Path: path, Rules: a.Rules, PID: uint32(fanotify.ProcessOf(tid)), Program: "the kernel"}
	if path == "" {
		told.Path, _ = os.Readlink(fmt.Sprintf("/proc/self/fd/%d", file)) // a trusted program, which is no protected object
	}
	if text, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", tid)); err == nil {
		told.Comm = strings.TrimSuffix(string(text), "\n")
	}
	if program, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", tid)); err == nil {
		told.Program = program
	}
	var space unix.Stat_t
	if unix.Stat(fmt.Sprintf("/proc/%d/ns/mnt", tid), &space) == nil {
		told.MountNS = uint32(space.Ino)
	}
	for _, rule := range r.rules {
		for _, name := range a.Rules {
			if rule.Name == name {
				told.Severity = policy.Worse(told.Severity, rule.Severity)
				told.Mitre = append(told.Mitre, rule.Mitre...)
			}
		}
	}
	return told
}

// Close ends the protection. Waiting opens go on.
func (g *Gate) Close() (err error) {
	close(g.ending)
	_, _ = unix.Write(g.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0}) // cannot fail
	<-g.ended
	err = errors.Join(g.holds.Close(), g.names.Close(), unix.Close(g.wake))
	for _, fd := range g.mounts {
		err = errors.Join(err, unix.Close(fd))
	}
	return err
}
