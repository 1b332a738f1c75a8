package gate

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/cgroup"
	"github.com/shunt-lb/shunt/internal/guard/fanotify"
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// Gate is this protection at work.
//
//	open, execute ──► holds, the opener waits ──► a goroutine of its own ──► answer, at the latest after AnswerMax
//	new names in protected folders ──► names ──► labels and marks, before any later open is judged
//
// The protection ends with the process: the kernel then lets all waiting opens go on. The Gate decides by the same policy and the same code as `shunt guard
// explain --policy`; it reads trust from /proc while the opener waits.
type Gate struct {
	options      Options
	holds, names *fanotify.Group
	room         chan struct{} // an element for each waiting open
	ending       chan struct{} // closed when the Gate should end
	wake         int           // eventfd that tells the reader that the Gate should end
	ended        chan struct{} // closed when the reader has ended
	learned      chan struct{} // closed when learnAlways has ended
	failed       chan error    // has the first failure

	ruling atomic.Pointer[ruling]
	began  time.Time
	counts [countsMax]atomic.Uint64
	took   atomic.Int64 // nanoseconds of all answers

	// The reader of opens never takes the mutex: the goroutine that has it may itself wait at an open of a protected folder.
	mutex     sync.Mutex             // of the fields below, and of the files and marks of rulings' readings
	mounts    map[string]int         // a descriptor of each file system
	marked    map[judge.Inode]string // one of the file's names
	handles   map[judge.Inode]fanotify.Handle
	byHandle  map[fanotify.Handle]judge.Inode // the inverse of handles: of files whose end is reported
	recording bool                            // a policy is being read
	recorded  []fresh                         // news since then
}

// Options are limits, and the folder of the note that protection by holding opens runs.
type Options struct {
	Folder    string                    // of the note, which outlives the process: the agent's folder
	AnswerMax time.Duration             // after it an open goes on, judged or not; 0: AnswerMax
	HangMax   time.Duration             // the kernel ends this process if it has not looked for opens for this long; 0: HangMax
	Tell      func(judge.Attempt) error // called by several goroutines at once
	// ObjectsMax limits the files that the Gate remembers: a policy with more files is refused, and a new file beyond the limit is counted; 0: policy.FilesMax, as at security hooks.
	ObjectsMax int

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
	countWaited = iota // answered
	countDenied
	countAudited // allowed, and reported
	countLate    // allowed, because the judgement took too long
	countUnsure  // the mode of the open was unknown, so that all operations were judged that the rules forbid
	countUnread  // new names that could not be read, or for which there was no room
	countsMax
)

// ruling is a policy as opens are judged by it.
type ruling struct {
	rules    []policy.Rule
	book     *judge.Book
	reading  *judge.Reading                              // the Gate's mutex guards its maps
	programs atomic.Pointer[map[judge.Inode]judge.Marks] // of executables; a stored map never changes
}

// Refusal is the reason why this kernel cannot make opens wait.
type Refusal struct {
	Reason string // the kernel's
	err    error
}

func (r *Refusal) Error() string { return r.Reason + ". Use a kernel with BPF LSM" }

func (r *Refusal) Unwrap() error { return r.err }

// Start makes opens of the policy's files wait, and judges them until Close. The error has a *Refusal if the kernel cannot make opens wait.
func Start(p policy.Policy, o Options) (g *Gate, err error) {
	if o.AnswerMax == 0 {
		o.AnswerMax = AnswerMax
	}
	if o.HangMax == 0 {
		o.HangMax = HangMax
	}
	if o.ObjectsMax == 0 {
		o.ObjectsMax = policy.FilesMax
	}
	if err := judge.SeesProcesses(); err != nil {
		return nil, err
	}
	g = &Gate{options: o, began: time.Now(), mounts: map[string]int{}, marked: map[judge.Inode]string{}, handles: map[judge.Inode]fanotify.Handle{}, byHandle: map[fanotify.Handle]judge.Inode{},
		room: make(chan struct{}, waitMax), ending: make(chan struct{}), ended: make(chan struct{}), learned: make(chan struct{}), failed: make(chan error, 1)}
	if g.holds, err = fanotify.Hold(); err != nil {
		return nil, &Refusal{err.Error(), err}
	}
	if g.names, err = fanotify.Names(unix.FAN_UNLIMITED_QUEUE); err != nil {
		return nil, &Refusal{err.Error(), errors.Join(err, g.holds.Close())}
	}
	if g.wake, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return nil, errors.Join(fmt.Errorf("wait for opens of protected files: %w", err), g.holds.Close(), g.names.Close())
	}
	go g.read() // before a file is marked: this process opens files, too
	go g.learnAlways()
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
	for range judge.RereadMax {
		var err error
		if next, err = g.prepare(p); err != nil {
			return err
		}
		if !next.reading.IsReplaced() {
			break
		}
	}
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.ruling.Store(next)
	g.recording = false
	for _, n := range g.recorded {
		g.take(next, n)
	}
	g.recorded = nil
	err := g.learn()
	for at, path := range g.marked { // of the policy before
		if _, is := next.reading.Marks[at]; is {
			continue
		}
		delete(g.marked, at)
		delete(g.byHandle, g.handles[at])
		delete(g.handles, at)
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
	l, b, err := judge.Read(p, func(path string, d fs.DirEntry) {
		if d.IsDir() && unmarked == nil {
			unmarked = g.watch(path)
		}
	})
	if err == nil && unmarked != nil {
		err = unmarked
	}
	g.mutex.Lock()
	defer g.mutex.Unlock()
	r := &ruling{rules: p.Enforced(), book: b, reading: l}
	if err == nil && len(l.Files) > g.options.ObjectsMax {
		err = fmt.Errorf("protect files: the policy covers %d files, and shunt can protect at most %d; name fewer or smaller folders", len(l.Files), g.options.ObjectsMax)
	}
	if err == nil {
		programs := map[judge.Inode]judge.Marks{}
		for at, m := range l.Marks {
			if m.Trusts|m.Guards|m.Interprets != 0 {
				programs[at] = m
			}
		}
		r.programs.Store(&programs)
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
	for path, at := range r.reading.Executables {
		if _, err := g.mark(r, at, path); err != nil {
			return err
		}
	}
	for at, o := range r.reading.Files {
		if _, err := g.mark(r, at, o.Name); err != nil {
			return err
		}
	}
	return nil
}

// mark makes opens of one file wait, if a rule forbids any; waits reports whether they do. The mark of a folder also covers the files in it, so that opens of
// new files wait.
func (g *Gate) mark(r *ruling, at judge.Inode, path string) (waits bool, err error) {
	mask := r.mask(r.reading.Marks[at])
	if mask == 0 {
		return false, nil
	}
	before, had := g.handles[at]
	g.follow(at, path) // before Lstat: the end of a file after it is reported
	var stat unix.Stat_t
	if err := unix.Lstat(path, &stat); err != nil || at != judge.InodeOf(stat) { // it was deleted or moved meanwhile: names reports its new name
		if after := g.handles[at]; after != before {
			delete(g.byHandle, after)
			if delete(g.handles, at); had {
				g.handles[at], g.byHandle[before] = before, at
			}
		}
		return false, nil //nolint:nilerr // see above
	}
	switch stat.Mode & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFDIR:
		mask |= unix.FAN_EVENT_ON_CHILD
		if r.book.Forbids(policy.Read)&r.reading.Marks[at].Rules != 0 {
			mask |= unix.FAN_ONDIR
		}
	default:
		return false, nil
	}
	if err := g.holds.Mark(unix.FAN_MARK_ADD, mask, path); err != nil {
		return false, fmt.Errorf("protect %s: the kernel cannot make opens of it wait: %w", path, err)
	}
	g.marked[at] = path
	return true, nil
}

// allMarks are the events that mark can add.
const allMarks = unix.FAN_OPEN_PERM | unix.FAN_OPEN_EXEC_PERM | unix.FAN_EVENT_ON_CHILD | unix.FAN_ONDIR

// unmark ends the wait for opens of a file. A file that has moved stays marked, which is harmless: its opens are under no rule.
func (g *Gate) unmark(at judge.Inode, path string) {
	var stat unix.Stat_t
	if unix.Lstat(path, &stat) == nil && at == judge.InodeOf(stat) {
		// The marks may be gone already.
		_ = g.holds.Mark(unix.FAN_MARK_REMOVE, allMarks, path)
		_ = g.names.Mark(unix.FAN_MARK_REMOVE, newNamesMask|goneMask, path)
	}
}

// mask returns the events that wait for a file with these marks.
func (r *ruling) mask(m judge.Marks) (mask uint64) {
	if m.Rules&(r.book.Forbids(policy.Write)|r.book.Forbids(policy.Read)) != 0 || m.Trusts&r.book.Forbids(judge.WriteProgram) != 0 {
		mask |= unix.FAN_OPEN_PERM
	}
	if m.Rules&r.book.Forbids(policy.Exec) != 0 {
		mask |= unix.FAN_OPEN_EXEC_PERM
	}
	return mask
}

// pollTime is the time that the reader waits for opens before it looks at the time.
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
	_ = unix.Setpriority(unix.PRIO_PROCESS, unix.Gettid(), readerPriority)
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

// readerPriority is the priority of the thread that reads opens (nice(2)), because other programs wait for it.
const readerPriority = -15

// isOwn reports whether a thread belongs to this process.
func isOwn(tid int) bool {
	var stat unix.Stat_t
	return unix.Stat(fmt.Sprintf("/proc/self/task/%d", tid), &stat) == nil
}

// hold judges one open, in time.
func (g *Gate) hold(e fanotify.Event) {
	began := time.Now()
	// The judge has a descriptor of its own: the event's is closed by the answer.
	file, err := unix.FcntlInt(uintptr(e.FD), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		<-g.room
		_, answered := g.holds.Answer(e, false)
		g.counts[countLate].Add(1)
		g.fail(answered)
		return
	}
	var once sync.Once
	answer := func(deny bool) (waited bool) {
		once.Do(func() {
			var err error
			waited, err = g.holds.Answer(e, deny)
			g.counts[countWaited].Add(1)
			g.took.Add(time.Since(began).Nanoseconds())
			g.fail(err)
			<-g.room
		})
		return waited
	}
	late := time.AfterFunc(g.options.AnswerMax, func() {
		if answer(false) {
			g.counts[countLate].Add(1)
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
		g.counts[map[bool]int{true: countDenied, false: countAudited}[a.Denied]].Add(1)
		g.fail(g.options.Tell(a))
	}
}

// judge reports whether rules forbid an open.
func (g *Gate) judge(e fanotify.Event, file int) (attempts []judge.Attempt, deny bool, err error) {
	var stat unix.Stat_t
	if err := unix.Fstat(file, &stat); err != nil {
		return nil, false, nil //nolint:nilerr // a file that cannot be identified is under no rule
	}
	r, label, name, err := g.look(judge.InodeOf(stat))
	if err != nil || label == (judge.Marks{}) {
		return nil, false, err
	}
	operations, unsure := r.asks(e, label)
	if unsure {
		g.counts[countUnsure].Add(1)
	}
	if len(operations) == 0 {
		return nil, false, nil
	}
	has := r.standing(e.PID)
	for _, operation := range operations {
		about := label.Rules
		if operation == judge.WriteProgram {
			about = label.Trusts
		}
		switch a := r.book.Answer(operation, about, has); a.Verdict {
		case judge.Denied, judge.Audited:
			attempts = append(attempts, r.attempt(a, e.PID, name, file))
			deny = deny || a.Verdict == judge.Denied
		}
	}
	return attempts, deny, nil
}

// look returns the ruling in force, and its label and name of a file.
func (g *Gate) look(at judge.Inode) (r *ruling, label judge.Marks, name string, err error) {
	return g.lookIn(nil, at)
}

// lookIn is look in a ruling; nil: the ruling in force.
func (g *Gate) lookIn(of *ruling, at judge.Inode) (r *ruling, label judge.Marks, name string, err error) {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	if err := g.learn(); err != nil {
		return nil, judge.Marks{}, "", err
	}
	if r = of; r == nil {
		r = g.ruling.Load()
	}
	if r == nil {
		return nil, judge.Marks{}, "", nil // the first policy is being loaded
	}
	return r, r.reading.Marks[at], r.reading.Files[at].Name, nil
}

// asks returns the operations of an open that a rule forbids for the file. If the mode of the open is not certain,
// these are all operations that a rule forbids.
func (r *ruling) asks(e fanotify.Event, label judge.Marks) (operations []string, unsure bool) {
	add := func(operation string, rules uint64) {
		if rules&r.book.Forbids(operation) != 0 {
			operations = append(operations, operation)
		}
	}
	if e.Mask&unix.FAN_OPEN_EXEC_PERM != 0 {
		add(policy.Exec, label.Rules)
		return operations, false
	}
	mode := fanotify.ModeOf(e.PID, AnswerMax/2) // a slow machine is no reason to refuse
	if !mode.IsSure {
		mode.Reads, mode.Writes = true, true
	}
	if e.Mask&unix.FAN_ONDIR != 0 { // no open of a folder is for writing
		mode.Writes = false
	}
	if mode.Writes {
		add(policy.Write, label.Rules)
		add(judge.WriteProgram, label.Trusts)
	}
	if mode.Reads {
		add(policy.Read, label.Rules)
	}
	return operations, !mode.IsSure && len(operations) > 0
}

// attempt describes a refusal, or an audited open.
func (r *ruling) attempt(a judge.Answer, tid int, path string, file int) judge.Attempt {
	told := judge.Attempt{Time: time.Now(), Denied: a.Verdict == judge.Denied, Operation: a.Operation, Path: path, Rules: a.Rules, PID: uint32(fanotify.ProcessOf(tid)), Program: "the kernel"}
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
	if path, err := judge.CgroupOf(tid); err == nil {
		told.CgroupID, _ = cgroup.ID(cgroup.Root() + path) // 0 if cgroup v2 is not mounted
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
	<-g.learned
	err = errors.Join(g.holds.Close(), g.names.Close(), unix.Close(g.wake))
	for _, fd := range g.mounts {
		err = errors.Join(err, unix.Close(fd))
	}
	return err
}
