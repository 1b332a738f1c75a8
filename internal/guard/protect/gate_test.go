package protect

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// keeper is another process with a Gate. A process whose own children's opens wait must not start programs: in Go no other goroutine may run from the
// fork to the exec.
type keeper struct {
	*helper
	b      *bench
	folder string
}

// ward has the keeper's policy, limits and faults.
type ward struct {
	Policy             policy.Policy
	AnswerMax, HangMax time.Duration
	Stuck              bool // it hangs at each open
	ObjectsMax         int
}

// gate has opens wait until the test ends.
func (b *bench) gate(w ward) *keeper {
	b.t.Helper()
	k := &keeper{b: b, folder: b.t.TempDir()}
	k.write(w)
	var err error
	if k.helper, err = begin("/proc/self/exe", "gate", k.folder); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		if k.helper != nil {
			if err := k.end(); err != nil {
				b.t.Error(err)
			}
		}
	})
	return k
}

func (k *keeper) write(w ward) {
	k.b.t.Helper()
	text, err := json.Marshal(w)
	if err == nil {
		err = os.WriteFile(filepath.Join(k.folder, "ward"), text, 0o600)
	}
	if err != nil {
		k.b.t.Fatal(err)
	}
}

// ask has it do something, and returns its answer.
func (k *keeper) ask(word string) string {
	k.b.t.Helper()
	_, err := k.in.WriteString(word + "\n")
	line := ""
	if err == nil {
		line, err = k.out.ReadString('\n')
	}
	if err != nil {
		k.b.t.Fatal(word, ": ", err)
	}
	return strings.TrimSpace(line)
}

func (k *keeper) status() (s GateStatus) {
	k.b.t.Helper()
	if err := json.Unmarshal([]byte(k.ask("status")), &s); err != nil {
		k.b.t.Fatal(err)
	}
	return s
}

func (k *keeper) explain(path string, pid int) (e *Explanation) {
	k.b.t.Helper()
	asked, err := json.Marshal(map[string]any{"Path": path, "PID": pid})
	if err == nil {
		err = json.Unmarshal([]byte(k.ask("explain "+string(asked))), &e)
	}
	if err != nil {
		k.b.t.Fatal(err)
	}
	return e
}

// told are the attempts since the last question.
func (k *keeper) told() (all []Attempt) {
	k.b.t.Helper()
	if err := json.Unmarshal([]byte(k.ask("told")), &all); err != nil {
		k.b.t.Fatal(err)
	}
	return all
}

// keep is the task of a keeper.
func keep(in *bufio.Reader, folder string) {
	quit := func(err error) {
		if err != nil {
			fmt.Println(err)
			os.Exit(2)
		}
	}
	read := func() (w ward) {
		text, err := os.ReadFile(filepath.Join(folder, "ward"))
		if err == nil {
			err = json.Unmarshal(text, &w)
		}
		quit(err)
		return w
	}
	var mu sync.Mutex
	all := []Attempt{}
	w := read()
	// A busy or emulated machine is to let no open pass that a test expects to be refused.
	w.AnswerMax, w.HangMax = cmp.Or(w.AnswerMax, time.Minute), cmp.Or(w.HangMax, 10*time.Minute)
	o := GateOptions{Folder: folder, ObjectsMax: w.ObjectsMax, AnswerMax: w.AnswerMax, HangMax: w.HangMax, Tell: func(a Attempt) error {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, a)
		return nil
	}}
	if w.Stuck {
		o.asked = func() { select {} }
	}
	g, err := StartGate(w.Policy, o)
	quit(err)
	fmt.Println("ready")
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			break
		}
		var answer any
		word, argument, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch word {
		case "explain":
			var asked struct {
				Path string
				PID  int
			}
			quit(json.Unmarshal([]byte(argument), &asked))
			e, err := g.Explain(asked.Path, asked.PID)
			quit(err)
			answer = e
		case "status":
			answer = g.Status()
		case "reload":
			answer = "done"
			if err := g.Apply(read().Policy); err != nil {
				answer = err.Error()
			}
		case "told":
			mu.Lock()
			answer = all
			all = []Attempt{}
			mu.Unlock()
		}
		quit(json.NewEncoder(os.Stdout).Encode(answer))
	}
	quit(g.End())
	select {
	case err := <-g.failed:
		quit(err)
	default:
	}
}

// byOpens are the rows of the matrix and of reads that are denied where opens wait and no hook is asked.
var byOpens = map[string]bool{
	"open-write": true, "open-append": true, "open-read-write": true, "open-read-only-truncating": true, "io_uring-open-write": true,
	"io_uring-poller-open-write": true, "symbolic-link": true, "hard-link-from-before": true, "reopen-by-proc": true, "bind-mount": true,
	"bind-mount-of-folder-above": true, "chroot": true, "open_tree-clone": true, "open_by_handle_at": true, createRow: true, "write-the-program": true,

	"read": true, "read-below": true, "read-to-write": true, "list-folder": true, "io_uring-open-read": true, "map-to-read": true,
	"read-symbolic-link": true, "read-hard-link-from-before": true, "read-new-hard-link": true, "read-after-rename": true,
	"read-after-rename-of-folder": true, "read-bind-mount-in-another-namespace": true, "read-bind-mount-of-folder-above": true, "read-chroot": true,
	"read-open_tree-clone": true, "read-open_by_handle_at": true, "read-by-root-of-a-process": true, "read-reopened-by-proc": true,
	lowerRow: true,
}

// lowerRow passes on Linux 6.1, where an overlay opens the file of its layer without an event; on 6.12 and 6.18 it is denied.
const lowerRow = "read-lower-layer-of-overlay"

// isByOpens reports whether opens that wait deny a row on this kernel.
func isByOpens(t *testing.T, row string) bool {
	if row != lowerRow {
		return byOpens[row]
	}
	var name unix.Utsname
	var major, minor int
	if err := unix.Uname(&name); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	return major > 6 || major == 6 && minor >= 12
}

// createRow is refused as a write, when the file is there already: it stays, empty.
const createRow = "create"

// TestGateMatrix tries the matrix, and the reads, where opens wait. The rows of byOpens are denied, and no others.
func TestGateMatrix(t *testing.T) {
	for name, rows := range map[string][]row{"matrix": matrix, "reads": reads} {
		t.Run(name, func(t *testing.T) {
			b := newDisk(t)
			rule := policy.Rule{Name: name, Deny: policy.Operations, Trust: policy.Trust{Programs: policy.Programs(b.trusted)}, Mode: policy.Deny}
			if name == "reads" {
				rule.Deny = []string{policy.Read}
			}
			var tries []*try
			for i := range rows {
				for _, a := range actors {
					one := b.prepare(&rows[i], a)
					tries = append(tries, one)
					if !a.isFree {
						rule.Paths = append(rule.Paths, filepath.Join(one.dir, "prot"))
						if name == "matrix" {
							rule.Trust.Programs = append(rule.Trust.Programs, policy.Program{Path: filepath.Join(one.dir, "out", "program")})
						}
					}
				}
			}
			k := b.gate(ward{Policy: policy.Policy{Rules: []policy.Rule{rule}}})
			b.evict()
			for _, one := range tries {
				one.was = snapshot(one.dir)
				t.Run(one.row.name+"/"+one.actor.name, func(t *testing.T) { b.judgeOpen(t, one, k, name == "matrix") })
			}
			if s := k.status(); s.Late+s.Unread > 0 || s.Audited > 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// judgeOpen has a try made, and compares the files, unless names may be moved first.
func (b *bench) judgeOpen(t *testing.T, one *try, k *keeper, compares bool) {
	said := b.makeTry(t, one)
	if one.target != nil {
		_ = one.target.end() // it may have been killed
	}
	want := "done"
	isRefused := one.actor.name == "untrusted" && isByOpens(t, one.row.name)
	if isRefused {
		want = "refused 1 "
	}
	if !strings.HasPrefix(said, want) {
		t.Errorf("%s, want %s", said, want)
	}
	if is := snapshot(one.dir); compares && isRefused && is != one.was && one.row.name != createRow {
		t.Errorf("changed from\n%s\nto\n%s", one.was, is)
	}
	isIt := func(a Attempt) bool {
		return a.Denied && a.Program == b.program(one.actor) && strings.HasPrefix(a.Path, one.dir+"/")
	}
	isTold := slices.ContainsFunc(k.told(), isIt)
	for until := time.Now().Add(time.Minute); isRefused && !isTold && time.Now().Before(until); time.Sleep(time.Millisecond) { // it is reported after the answer
		isTold = slices.ContainsFunc(k.told(), isIt)
	}
	if isTold != isRefused {
		t.Errorf("refused: %v, told: %v", isRefused, isTold)
	}
}

// keepOne has a keeper protect one file from being written, and returns the file.
func (b *bench) keepOne(w ward) (*keeper, string) {
	b.t.Helper()
	file := filepath.Join(b.folder("one"), "prot", "f")
	w.Policy.Rules = []policy.Rule{{Name: "one", Paths: []string{filepath.Dir(file)}, Deny: []string{policy.Write}, Trust: policy.Trust{Programs: policy.Programs(b.trusted)}, Mode: policy.Deny}}
	return b.gate(w), file
}

// waits expects that a write by a program waits for an answer: it returns the program, which has tried.
func (b *bench) waits(file string) *helper {
	b.t.Helper()
	h, err := begin(b.other, "write-path", file)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := h.in.WriteString("\n"); err != nil {
		b.t.Fatal(err)
	}
	for until := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/wchan", h.cmd.Process.Pid))
		for _, task := range tasks {
			if text, _ := os.ReadFile(task); strings.HasPrefix(string(text), "fanotify") {
				return h
			}
		}
		if time.Now().After(until) {
			b.t.Fatal("the open does not wait")
		}
	}
}

// said returns the program's report about the write that it tried before.
func (b *bench) said(h *helper) string {
	b.t.Helper()
	line, err := h.out.ReadString('\n')
	if err = errors.Join(err, h.end()); err != nil {
		b.t.Fatal(err)
	}
	return strings.TrimSpace(line)
}

// An open that waits goes on when the agent is killed, and the status has the time of that.
func TestGateThatIsKilled(t *testing.T) {
	b := newDisk(t)
	k, file := b.keepOne(ward{Stuck: true, AnswerMax: time.Hour, HangMax: time.Hour})
	h := b.waits(file)
	began := time.Now()
	_ = k.cmd.Process.Kill()
	if said := b.said(h); said != "done" {
		t.Errorf("after the agent was killed: %s", said)
	}
	_ = k.end() // it was killed
	k.helper = nil
	s, err := LookGate(k.folder)
	if err != nil || s == nil || !s.Killed || s.Ended.After(time.Now()) || began.Sub(s.Ended) > time.Minute || s.Rules[0].Name != "one" {
		t.Errorf("%+v %v", s, err)
	}
	b.expect(false, b.other, "write-path", file, "that is protected no more")
	half := noteIn(k.folder) + ".new" // as an agent leaves it that is killed while it writes
	if err := os.WriteFile(half, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if was, err := ForgetGate(k.folder); err != nil || !was {
		t.Errorf("forget the note: %t, %v", was, err)
	}
	for _, path := range []string{half, noteIn(k.folder)} {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
}

// An agent whose judge hangs answers in time, and counts that.
func TestGateAnswersInTime(t *testing.T) {
	b := newDisk(t)
	k, file := b.keepOne(ward{Stuck: true, AnswerMax: time.Second})
	b.expect(false, b.other, "write-path", file, "whose judge hangs")
	for until := time.Now().Add(time.Minute); k.status().Late < 1 && time.Now().Before(until); time.Sleep(time.Millisecond) { // it is counted after the answer
	}
	if s := k.status(); s.Late != 1 || s.Denied != 0 {
		t.Errorf("%+v", s)
	}
	_ = k.cmd.Process.Kill() // its end waits for the judge
	_ = k.end()
	k.helper = nil
}

// The kernel ends an agent that is stopped, and the open that waited goes on.
func TestGateThatHangs(t *testing.T) {
	b := newDisk(t)
	k, file := b.keepOne(ward{HangMax: 2 * time.Second})
	b.expect(true, b.other, "write-path", file, "while the agent is well")
	if err := k.cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	h := b.waits(file)
	if said := b.said(h); said != "done" {
		t.Errorf("after the agent hung: %s", said)
	}
	var exit *exec.ExitError
	if err := k.end(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != unix.SIGKILL {
		t.Errorf("the agent: %v", err)
	}
	k.helper = nil
}

// Another policy is in force at once, both for its own files and for files that it does not name any more; one with a
// fault changes nothing.
func TestGateReloads(t *testing.T) {
	b := newDisk(t)
	k, first := b.keepOne(ward{})
	second := filepath.Join(b.folder("two"), "prot", "f")
	rule := policy.Rule{Name: "two", Paths: []string{filepath.Dir(second)}, Deny: []string{policy.Write}, Mode: policy.Deny}
	b.expect(true, b.other, "write-path", first, "of the first policy")
	b.expect(false, b.trusted, "write-path", first, "of the first policy, by a trusted program")
	k.write(ward{Policy: policy.Policy{Rules: []policy.Rule{{Name: "none", Paths: []string{second + "-none"}, Deny: []string{policy.Write}, Mode: policy.Deny}}}})
	if answer := k.ask("reload"); !strings.Contains(answer, "does not exist") {
		t.Errorf("a policy with a fault: %s", answer)
	}
	b.expect(true, b.other, "write-path", first, "after a policy with a fault")
	k.write(ward{Policy: policy.Policy{Rules: []policy.Rule{rule}}})
	if answer := k.ask("reload"); answer != `"done"` {
		t.Fatal(answer)
	}
	b.expect(false, b.other, "write-path", first, "of the first policy, under the second")
	b.expect(true, b.other, "write-path", second, "of the second policy")
	for until := time.Now().Add(time.Minute); k.status().Denied < 3 && time.Now().Before(until); time.Sleep(time.Millisecond) { // it is counted after the answer
	}
	if s := k.status(); s.Denied != 3 || len(s.Rules) != 1 || s.Rules[0].Name != "two" {
		t.Errorf("%+v", s)
	}
}

// New files and folders in a protected folder are protected, also the ones that come with a folder that is moved there,
// and by other names.
func TestGateFollowsNewFiles(t *testing.T) {
	b := newDisk(t)
	_, file := b.keepOne(ward{})
	folder := filepath.Dir(file)
	made := filepath.Join(folder, "new", "deeper")
	moved := filepath.Join(b.root, "moved")
	if err := errors.Join(os.MkdirAll(made, 0o755), os.MkdirAll(filepath.Join(moved, "in"), 0o755), os.WriteFile(filepath.Join(moved, "in", "f"), []byte("x"), 0o644)); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(moved, filepath.Join(folder, "moved")); err != nil {
		t.Fatal(err)
	}
	// A file is made by a trusted program, for an open by another one to follow.
	for _, path := range []string{filepath.Join(folder, "g2"), filepath.Join(made, "f")} {
		h, err := begin(b.trusted, "make-path", path)
		if err != nil {
			t.Fatal(err)
		}
		if said, err := h.attempt(); said != "done" || err != nil {
			t.Fatal(said, err)
		}
		b.expect(true, b.other, "write-path", path, "that is new")
	}
	b.expect(true, b.other, "write-path", filepath.Join(folder, "moved", "in", "f"), "that came with a folder")
	link := filepath.Join(b.root, "link")
	if err := os.Link(filepath.Join(folder, "g2"), link); err != nil {
		t.Fatal(err)
	}
	b.expect(true, b.other, "write-path", link, "by a name outside")
}

// TestGateFamily tries which programs are trusted, as TestFamily does at security hooks. The same are, but for scripts.
func TestGateFamily(t *testing.T) {
	b := newDisk(t)
	f := b.newFamily()
	f.isByProc = true
	b.gate(ward{Policy: policy.Policy{Rules: f.rules()}})
	f.test(t)
}
