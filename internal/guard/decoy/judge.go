package decoy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/fanotify"
	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// The rules of the alerts.
const (
	RuleEncryptor = "decoy-encryptor" // a program treats decoys as an encryptor does
	RuleTouched   = "decoy-touched"   // a program touched a decoy
)

// Type is the type of the alerts' events.
const Type = "decoy"

// Technique is the technique in MITRE ATT&CK: data encrypted for impact.
const Technique = "T1486"

const (
	// sameFor is the time for which a process's acts count against it, and togetherFor the time for which acts of two
	// processes count as those of one program. The first is longer: a slow process stays the same process, while two
	// processes that share only a session may have nothing to do with each other.
	sameFor     = 10 * time.Minute
	togetherFor = time.Minute
	// toldFor is the time after which the guard reports again that a program reads decoys.
	toldFor = time.Hour
	// readsMax and harmsMax limit the acts that are remembered; the oldest are forgotten.
	readsMax  = 32
	harmsMax  = 1024
	chainsMax = 4096
	// headBytes is the number of bytes that show the kind of a file.
	headBytes = 64
)

// read is an act: a process opened a decoy to read it.
type read struct {
	by   []proc
	at   time.Time
	copy bool // a new file came into the folder afterwards
}

// harm is an encryptor's act on a file.
type harm struct {
	bait *bait
	how  string
	by   []proc
	at   time.Time
}

// judge remembers programs and their acts.
type judge struct {
	harms  []harm
	chains map[int][]proc    // of processes that opened a decoy: they may have ended when their next event comes
	told   map[key]time.Time // when it was reported that a process touches decoys
}

// chainOf returns a process with the processes above it, even if it ended a moment ago.
func (w *Watch) chainOf(pid int) []proc {
	if c := chain(pid, w.spared); len(c) > 0 {
		return c
	}
	return w.chains[pid]
}

func (w *Watch) remember(pid int, c []proc) {
	if w.chains == nil || len(w.chains) >= chainsMax {
		w.chains = map[int][]proc{}
	}
	w.chains[pid] = c
}

// isTrusted reports whether the policy lets a program do as it likes in a folder.
func (f *folder) isTrusted(c []proc) bool {
	return len(c) > 0 && f.trust[inode{c[0].device, c[0].inode}]
}

// open judges a waiting open. deny says that it has to fail.
func (w *Watch) open(o opened) (deny bool, err error) {
	b := w.inodes[o.file]
	c := chain(o.pid, w.spared)
	if b == nil || len(c) == 0 {
		return false, nil
	}
	w.remember(o.pid, c)
	if b.folder.isTrusted(c) {
		return false, nil
	}
	if fanotify.ModeOf(o.tid, 20*time.Millisecond).Writes { // one that is not known counts as reading: the write is seen when it is made
		_, err := w.harmed(harm{b, "opened for writing", c, time.Now()}, false)
		return err == nil && w.isKilled(b, c), err
	}
	if b.reads = append(b.reads, read{by: c, at: time.Now()}); len(b.reads) > readsMax {
		b.reads = b.reads[1:]
	}
	return false, w.touched(b, "opened for reading", c)
}

// isKilled reports whether the policy has ended the opener by now: its open is then refused.
func (w *Watch) isKilled(b *bait, c []proc) bool {
	return b.folder.Part.Action == rule.Kill && slices.ContainsFunc(w.harms, func(h harm) bool { return h.how == ended && common(h.by, c) != nil })
}

// ended is the act of a program that was ended.
const ended = "ended"

// noted judges an act that has happened.
func (w *Watch) noted(n note) error {
	if b := n.file; b != nil {
		return w.written(b, n)
	}
	if n.from != nil && n.mask&unix.FAN_RENAME != 0 {
		if b := n.from.baits[n.fromName]; b != nil {
			if err := w.renamed(b, n); err != nil {
				return err
			}
		}
	}
	if n.to == nil {
		return nil
	}
	b := n.to.baits[n.name]
	switch {
	case b == nil && n.mask&(unix.FAN_CREATE|unix.FAN_RENAME) != 0:
		return w.beside(n)
	case b == nil:
		return nil
	case n.mask&unix.FAN_DELETE != 0:
		w.become(b, Gone)
		return w.deleted(b, n)
	case n.mask&(unix.FAN_CREATE|unix.FAN_RENAME) != 0:
		return w.replaced(b, n)
	}
	return nil
}

// written judges a change of a decoy's contents, or the close of a decoy that was opened to write.
func (w *Watch) written(b *bait, n note) error {
	c := w.chainOf(n.pid)
	if n.mask&unix.FAN_MODIFY != 0 {
		w.become(b, Changed)
	}
	if b.folder.isTrusted(c) {
		return nil
	}
	path := b.Path
	if n.to != nil && n.name != "" {
		path = join(n.to.Path, n.name)
	}
	if n.mask&unix.FAN_MODIFY != 0 {
		if _, err := w.harmed(harm{b, "written to", c, time.Now()}, false); err != nil {
			return err
		}
	}
	if n.mask&unix.FAN_CLOSE_WRITE == 0 || b.state != Changed {
		return nil
	}
	isOther, err := w.isOtherKind(b, path)
	if err != nil || !isOther {
		return err
	}
	_, err = w.harmed(harm{b, "overwritten with contents that are not " + b.Kind, c, time.Now()}, true)
	return err
}

// renamed judges a new name of a decoy. A decoy that was only moved has kept the last part of its name.
func (w *Watch) renamed(b *bait, n note) error {
	w.become(b, Gone)
	c := w.chainOf(n.pid)
	switch {
	case b.folder.isTrusted(c):
		return nil
	case n.to == n.from && n.name != n.fromName:
		_, err := w.harmed(harm{b, "renamed to " + strconv.Quote(n.name), c, time.Now()}, false)
		return err
	}
	return w.touched(b, "moved away", c)
}

// replaced judges a file that came into a decoy's place, or a decoy that came back.
func (w *Watch) replaced(b *bait, n note) error {
	state, err := w.stateOf(b)
	if err != nil {
		return err
	}
	w.mutex.Lock()
	b.state = state
	w.mark(b)
	w.mutex.Unlock()
	c := w.chainOf(n.pid)
	if state != Changed || b.folder.isTrusted(c) {
		return nil
	}
	isOther, err := w.isOtherKind(b, b.Path)
	if err != nil {
		return err
	}
	how := "replaced"
	if isOther {
		how = "replaced by contents that are not " + b.Kind
	}
	_, err = w.harmed(harm{b, how, c, time.Now()}, isOther)
	return err
}

// beside judges a new file in a folder: it is a copy of a decoy if its maker has read a decoy just before.
func (w *Watch) beside(n note) error {
	var c []proc
	var latest *read
	var of *bait
	for _, b := range n.to.baits {
		for i := range b.reads {
			r := &b.reads[i]
			if r.copy || time.Since(r.at) > togetherFor || latest != nil && r.at.Before(latest.at) {
				continue
			}
			if c == nil {
				if c = w.chainOf(n.pid); c == nil {
					return nil
				}
			}
			if common(r.by, c) != nil {
				latest, of = r, b
			}
		}
	}
	if latest == nil {
		return nil
	}
	latest.copy = true
	stem := strings.TrimSuffix(filepath.Base(of.Path), filepath.Ext(of.Path))
	if !strings.Contains(n.name, stem) || of.folder.isTrusted(c) {
		return nil
	}
	_, err := w.harmed(harm{of, "read and written beside as " + strconv.Quote(n.name), c, time.Now()}, false)
	return err
}

// deleted judges the deletion of a decoy. It is harm if the same program has read the decoy before; otherwise it resembles rm -r.
func (w *Watch) deleted(b *bait, n note) error {
	c := w.chainOf(n.pid)
	if b.folder.isTrusted(c) {
		return nil
	}
	for _, r := range slices.Backward(b.reads) {
		age := time.Since(r.at)
		switch {
		case len(c) > 0 && r.by[0].key == c[0].key && age < sameFor: // the same process has read it
		case age < togetherFor && r.copy && (len(c) == 0 || common(r.by, c) != nil): // a helper, such as rm, that may have ended
			if len(c) == 0 {
				c = r.by
			}
		default:
			continue
		}
		_, err := w.harmed(harm{b, "read and deleted", c, time.Now()}, false)
		return err
	}
	return w.touched(b, "deleted", c)
}

// harmed judges harm together with earlier acts. One decoy whose contents have no known kind any more is enough; otherwise it takes two
// decoys, because anybody may open one file by mistake.
func (w *Watch) harmed(h harm, isCertain bool) (stopped bool, err error) {
	if len(h.by) == 0 {
		return false, w.touched(h.bait, h.how, nil)
	}
	var before *harm
	roots := []proc{top(h.by)}
	for i := range w.harms {
		other := &w.harms[i]
		meet := common(other.by, h.by)
		age := h.at.Sub(other.at)
		if meet == nil || other.bait == h.bait && other.how != ended || age > sameFor || age > togetherFor && meet.key != h.by[0].key {
			continue
		}
		before = other
		roots = append(roots, *meet)
	}
	if w.harms = append(w.harms, h); len(w.harms) > harmsMax {
		w.harms = w.harms[1:]
	}
	if before == nil && !isCertain {
		return false, w.touched(h.bait, h.how, h.by)
	}
	return true, w.act(h, before, roots)
}

// act stops or ends a program, and reports it.
func (w *Watch) act(h harm, before *harm, roots []proc) error {
	action := h.bait.folder.Part.Action
	why := fmt.Sprintf("%s was %s", h.bait.Path, h.how)
	if before != nil && before.how != ended {
		why = fmt.Sprintf("%s was %s, after %s was %s", h.bait.Path, h.how, before.bait.Path, before.how)
	}
	f := w.found(RuleEncryptor, "critical", action, h.by, h.bait, fmt.Sprintf("%s treats decoys as an encryptor does: %s", nameOf(h.by), why))
	f.Mitre = []string{Technique}
	isNew := true
	switch action {
	case rule.Stop, rule.Kill:
		var err error
		if f.Done, isNew, err = w.end(action, h, roots, why); err != nil {
			f.Done += "; " + err.Error()
		}
	default:
		isNew = w.isNewChain(h.by, RuleEncryptor)
	}
	w.touch(h.bait, h.how, h.by)
	if !isNew {
		return nil
	}
	return w.tell(f)
}

// end stops the trees of the roots, or ends them. It is new unless a tree of the program was stopped already, or was allowed to go on.
func (w *Watch) end(action string, h harm, roots []proc, why string) (done string, isNew bool, err error) {
	var reached []proc
	isNew = true
	signalled := false
	err = edit(w.options.State, func(t *trees) (err error) {
		known := slices.IndexFunc(t.Trees, func(one Tree) bool { return one.has(h.by) })
		signalled = true
		if known >= 0 && t.Trees[known].Released {
			isNew = false
			return nil
		}
		if action == rule.Kill {
			reached, err = signal(roots, unix.SIGKILL, w.spared)
			return err
		}
		if reached, err = signal(roots, unix.SIGSTOP, w.spared); len(reached) == 0 {
			return err
		}
		isNew = known < 0
		if isNew {
			t.Trees = append(t.Trees, Tree{At: h.at, Why: why})
			known = len(t.Trees) - 1
		}
		t.Trees[known].add(reached)
		return err
	})
	switch {
	case !signalled: // it cannot be noted, and must not go on all the same
		sig := unix.SIGSTOP
		if action == rule.Kill {
			sig = unix.SIGKILL
		}
		var bad error
		reached, bad = signal(roots, sig, w.spared)
		err = errors.Join(err, bad)
	case !isNew:
		return "", false, err
	}
	if action == rule.Kill {
		w.harms = append(w.harms, harm{h.bait, ended, h.by, h.at})
		isNew = w.isNewChain(h.by, RuleEncryptor)
	}
	return doneText(action, reached), isNew, err
}

func processesText(n int) string {
	if n == 1 {
		return "1 process"
	}
	return fmt.Sprintf("%d processes", n)
}

func doneText(action string, reached []proc) string {
	word := "stopped"
	if action == rule.Kill {
		word = "ended"
	}
	if len(reached) == 0 {
		return "NOT " + word + ": it has ended"
	}
	text := fmt.Sprintf("%s, with all processes that belong to it: %s", word, processesText(len(reached)))
	if action == rule.Stop {
		text += fmt.Sprintf("; `shunt guard decoys release %d` lets it go on, `shunt guard decoys kill %d` ends it", reached[0].pid, reached[0].pid)
	}
	return text
}

// found returns an alert or a note.
func (w *Watch) found(name, severity, action string, c []proc, b *bait, text string) detect.Found {
	e := &rule.Event{Time: time.Now(), Type: Type, Path: b.Path, Ancestors: []rule.Process{}}
	if len(c) > 0 {
		e.Process = c[0].event()
		for _, p := range c[1:] {
			e.Ancestors = append(e.Ancestors, p.event())
		}
		e.User = userOf(c[0].pid)
	}
	return detect.Found{Rule: name, Severity: severity, Mitre: []string{}, Action: action, Text: text, Event: e}
}

func nameOf(c []proc) string {
	if len(c) == 0 {
		return "a process that has ended"
	}
	return c[0].program
}

// userOf returns the real and the effective user of a process.
func userOf(pid int) (u rule.User) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u
	}
	_, after, _ := strings.Cut(string(text), "\nUid:")
	if words := strings.Fields(after); len(words) > 1 {
		uid, _ := strconv.ParseUint(words[0], 10, 32)
		euid, _ := strconv.ParseUint(words[1], 10, 32)
		u.UID, u.EUID = uint32(uid), uint32(euid)
	}
	return u
}

// touched reports that a process touched a decoy, once an hour for a program.
func (w *Watch) touched(b *bait, how string, c []proc) error {
	w.touch(b, how, c)
	if !w.isNewChain(c, RuleTouched) {
		return nil
	}
	return w.tell(w.found(RuleTouched, "low", rule.Log, c, b, fmt.Sprintf("%s was %s by %s", b.Path, how, nameOf(c))))
}

// isNewChain reports whether a program was not reported for a while, by the highest of its processes.
func (w *Watch) isNewChain(c []proc, name string) bool {
	k := key{}
	if len(c) > 0 {
		k = top(c).key
	}
	if name == RuleEncryptor {
		k.pid = -k.pid // so that it differs from mere touches
	}
	if w.judge.told == nil || len(w.judge.told) >= chainsMax {
		w.judge.told = map[key]time.Time{}
	}
	if at, is := w.judge.told[k]; is && time.Since(at) < toldFor {
		return false
	}
	w.judge.told[k] = time.Now()
	return true
}

// isOtherKind reports whether a file does not begin as one of the decoy's kind does. An empty file may be one that is being written.
func (w *Watch) isOtherKind(b *bait, path string) (isOther bool, err error) {
	err = w.aside(func() {
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err != nil {
			return // the file has gone by now
		}
		f := os.NewFile(uintptr(fd), path)
		defer f.Close() //nolint:errcheck // only read
		head := make([]byte, headBytes)
		n, err := io.ReadFull(f, head)
		if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
			return
		}
		isOther = !looksLike(b.Kind, head[:n])
	})
	return isOther, err
}

// looksLike reports whether a file that begins with head may be one of the kind.
func looksLike(kind string, head []byte) bool {
	if kind != sql {
		return bytes.HasPrefix(head, magic[kind])
	}
	for len(head) > 0 {
		r, size := utf8.DecodeRune(head)
		if r == utf8.RuneError && size == 1 && utf8.FullRune(head) || r < ' ' && r != '\n' && r != '\r' && r != '\t' {
			return false
		}
		head = head[size:]
	}
	return true
}

// stateOf returns the decoy's state, which it reads while it answers opens of this process.
func (w *Watch) stateOf(b *bait) (state string, err error) {
	err = w.aside(func() { state, _ = b.Decoy.state() })
	return state, err
}

// aside runs a function that opens decoys, and answers these opens meanwhile. Opens of other processes wait.
func (w *Watch) aside(do func()) error {
	done := make(chan struct{})
	go func() {
		do()
		close(done)
		w.poke()
	}()
	for {
		if err := w.readHeld(); err != nil {
			return err
		}
		select {
		case <-done:
			return nil
		default:
		}
		if err := w.wait(w.perm); err != nil {
			return err
		}
	}
}
