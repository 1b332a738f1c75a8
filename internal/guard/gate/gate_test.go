package gate

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

	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/guard/trial"
)

// bench is a trial.Bench where opens wait.
type bench struct {
	*trial.Bench
	t *testing.T
}

func newBench(t *testing.T) *bench {
	t.Helper()
	return &bench{trial.NewBench(t), t}
}

// keeper is another process with a Gate. A process whose own children's opens wait must not start programs: in Go no other goroutine may run from the
// fork to the exec.
type keeper struct {
	*trial.Helper
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
	if k.Helper, err = trial.Begin("/proc/self/exe", "gate", k.folder); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		if k.Helper != nil {
			if err := k.End(); err != nil {
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
	_, err := k.In.WriteString(word + "\n")
	line := ""
	if err == nil {
		line, err = k.Out.ReadString('\n')
	}
	if err != nil {
		k.b.t.Fatal(word, ": ", err)
	}
	return strings.TrimSpace(line)
}

func (k *keeper) status() (s Status) {
	k.b.t.Helper()
	if err := json.Unmarshal([]byte(k.ask("status")), &s); err != nil {
		k.b.t.Fatal(err)
	}
	return s
}

func (k *keeper) explain(path string, pid int) (e *judge.Explanation) {
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
func (k *keeper) told() (all []judge.Attempt) {
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
	all := []judge.Attempt{}
	w := read()
	// A busy or emulated machine is to let no open pass that a test expects to be refused.
	w.AnswerMax, w.HangMax = cmp.Or(w.AnswerMax, time.Minute), cmp.Or(w.HangMax, 10*time.Minute)
	o := Options{Folder: folder, ObjectsMax: w.ObjectsMax, AnswerMax: w.AnswerMax, HangMax: w.HangMax, Tell: func(a judge.Attempt) error {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, a)
		return nil
	}}
	if w.Stuck {
		o.asked = func() { select {} }
	}
	g, err := Start(w.Policy, o)
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
			all = []judge.Attempt{}
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

// isByOpens reports whether opens that wait deny a row on this kernel.
func isByOpens(t *testing.T, row string) bool {
	if row != trial.LowerRow {
		return trial.ByOpens[row]
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

// TestGateMatrix tries the matrix, and the reads, where opens wait. The rows of trial.ByOpens are denied, and no others.
func TestGateMatrix(t *testing.T) {
	for name, rows := range map[string][]trial.Row{"matrix": trial.Matrix, "reads": trial.Reads} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			rule := policy.Rule{Name: name, Deny: policy.Operations, Trust: policy.Trust{Programs: policy.Programs(b.Trusted)}, Mode: policy.Deny}
			if name == "reads" {
				rule.Deny = []string{policy.Read}
			}
			var tries []*trial.Try
			for i := range rows {
				for _, a := range trial.Actors {
					one := b.Prepare(&rows[i], a)
					tries = append(tries, one)
					if !a.IsFree {
						rule.Paths = append(rule.Paths, filepath.Join(one.Dir, "prot"))
						if name == "matrix" {
							rule.Trust.Programs = append(rule.Trust.Programs, policy.Program{Path: filepath.Join(one.Dir, "out", "program")})
						}
					}
				}
			}
			k := b.gate(ward{Policy: policy.Policy{Rules: []policy.Rule{rule}}})
			b.Evict()
			for _, one := range tries {
				one.Was = trial.Snapshot(one.Dir)
				t.Run(one.Row.Name+"/"+one.Actor.Name, func(t *testing.T) { b.judgeOpen(t, one, k, name == "matrix") })
			}
			if s := k.status(); s.Late+s.Unread > 0 || s.Audited > 0 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// judgeOpen has a try made, and compares the files, unless names may be moved first.
func (b *bench) judgeOpen(t *testing.T, one *trial.Try, k *keeper, compares bool) {
	said := b.MakeTry(t, one)
	if one.Target != nil {
		_ = one.Target.End() // it may have been killed
	}
	want := "done"
	isRefused := one.Actor.Name == "untrusted" && isByOpens(t, one.Row.Name)
	if isRefused {
		want = "refused 1 "
	}
	if !strings.HasPrefix(said, want) {
		t.Errorf("%s, want %s", said, want)
	}
	if is := trial.Snapshot(one.Dir); compares && isRefused && is != one.Was && one.Row.Name != trial.CreateRow {
		t.Errorf("changed from\n%s\nto\n%s", one.Was, is)
	}
	isIt := func(a judge.Attempt) bool {
		return a.Denied && a.Program == b.Program(one.Actor) && strings.HasPrefix(a.Path, one.Dir+"/")
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
	file := filepath.Join(b.Folder("one"), "prot", "f")
	w.Policy.Rules = []policy.Rule{{Name: "one", Paths: []string{filepath.Dir(file)}, Deny: []string{policy.Write}, Trust: policy.Trust{Programs: policy.Programs(b.Trusted)}, Mode: policy.Deny}}
	return b.gate(w), file
}

// waits expects that a write by a program waits for an answer: it returns the program, which has tried.
func (b *bench) waits(file string) *trial.Helper {
	b.t.Helper()
	h, err := trial.Begin(b.Other, "write-path", file)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := h.In.WriteString("\n"); err != nil {
		b.t.Fatal(err)
	}
	for until := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/wchan", h.Cmd.Process.Pid))
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
func (b *bench) said(h *trial.Helper) string {
	b.t.Helper()
	line, err := h.Out.ReadString('\n')
	if err = errors.Join(err, h.End()); err != nil {
		b.t.Fatal(err)
	}
	return strings.TrimSpace(line)
}

// An open that waits goes on when the agent is killed, and the status has the time of that.
func TestGateThatIsKilled(t *testing.T) {
	b := newBench(t)
	k, file := b.keepOne(ward{Stuck: true, AnswerMax: time.Hour, HangMax: time.Hour})
	h := b.waits(file)
	began := time.Now()
	_ = k.Cmd.Process.Kill()
	if said := b.said(h); said != "done" {
		t.Errorf("after the agent was killed: %s", said)
	}
	_ = k.End() // it was killed
	k.Helper = nil
	s, err := Look(k.folder)
	if err != nil || s == nil || !s.Killed || s.Ended.After(time.Now()) || began.Sub(s.Ended) > time.Minute || s.Rules[0].Name != "one" {
		t.Errorf("%+v %v", s, err)
	}
	b.Expect(false, b.Other, "write-path", file, "that is protected no more")
	half := noteIn(k.folder) + ".new" // as an agent leaves it that is killed while it writes
	if err := os.WriteFile(half, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if was, err := Forget(k.folder); err != nil || !was {
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
	b := newBench(t)
	k, file := b.keepOne(ward{Stuck: true, AnswerMax: time.Second})
	b.Expect(false, b.Other, "write-path", file, "whose judge hangs")
	for until := time.Now().Add(time.Minute); k.status().Late < 1 && time.Now().Before(until); time.Sleep(time.Millisecond) { // it is counted after the answer
	}
	if s := k.status(); s.Late != 1 || s.Denied != 0 {
		t.Errorf("%+v", s)
	}
	_ = k.Cmd.Process.Kill() // its end waits for the judge
	_ = k.End()
	k.Helper = nil
}

// The kernel ends an agent that is stopped, and the open that waited goes on.
func TestGateThatHangs(t *testing.T) {
	b := newBench(t)
	k, file := b.keepOne(ward{HangMax: 2 * time.Second})
	b.Expect(true, b.Other, "write-path", file, "while the agent is well")
	if err := k.Cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	h := b.waits(file)
	if said := b.said(h); said != "done" {
		t.Errorf("after the agent hung: %s", said)
	}
	var exit *exec.ExitError
	if err := k.End(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != unix.SIGKILL {
		t.Errorf("the agent: %v", err)
	}
	k.Helper = nil
}

// Another policy is in force at once, both for its own files and for files that it does not name any more; one with a
// fault changes nothing.
func TestGateReloads(t *testing.T) {
	b := newBench(t)
	k, first := b.keepOne(ward{})
	second := filepath.Join(b.Folder("two"), "prot", "f")
	rule := policy.Rule{Name: "two", Paths: []string{filepath.Dir(second)}, Deny: []string{policy.Write}, Mode: policy.Deny}
	b.Expect(true, b.Other, "write-path", first, "of the first policy")
	b.Expect(false, b.Trusted, "write-path", first, "of the first policy, by a trusted program")
	k.write(ward{Policy: policy.Policy{Rules: []policy.Rule{{Name: "none", Paths: []string{second + "-none"}, Deny: []string{policy.Write}, Mode: policy.Deny}}}})
	if answer := k.ask("reload"); !strings.Contains(answer, "does not exist") {
		t.Errorf("a policy with a fault: %s", answer)
	}
	b.Expect(true, b.Other, "write-path", first, "after a policy with a fault")
	k.write(ward{Policy: policy.Policy{Rules: []policy.Rule{rule}}})
	if answer := k.ask("reload"); answer != `"done"` {
		t.Fatal(answer)
	}
	b.Expect(false, b.Other, "write-path", first, "of the first policy, under the second")
	b.Expect(true, b.Other, "write-path", second, "of the second policy")
	for until := time.Now().Add(time.Minute); k.status().Denied < 3 && time.Now().Before(until); time.Sleep(time.Millisecond) { // it is counted after the answer
	}
	if s := k.status(); s.Denied != 3 || len(s.Rules) != 1 || s.Rules[0].Name != "two" {
		t.Errorf("%+v", s)
	}
}

// New files and folders in a protected folder are protected, also the ones that come with a folder that is moved there,
// and by other names.
func TestGateFollowsNewFiles(t *testing.T) {
	b := newBench(t)
	_, file := b.keepOne(ward{})
	folder := filepath.Dir(file)
	made := filepath.Join(folder, "new", "deeper")
	moved := filepath.Join(b.Root, "moved")
	if err := errors.Join(os.MkdirAll(made, 0o755), os.MkdirAll(filepath.Join(moved, "in"), 0o755), os.WriteFile(filepath.Join(moved, "in", "f"), []byte("x"), 0o644)); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(moved, filepath.Join(folder, "moved")); err != nil {
		t.Fatal(err)
	}
	// A file is made by a trusted program, for an open by another one to follow.
	for _, path := range []string{filepath.Join(folder, "g2"), filepath.Join(made, "f")} {
		h, err := trial.Begin(b.Trusted, "make-path", path)
		if err != nil {
			t.Fatal(err)
		}
		if said, err := h.Attempt(); said != "done" || err != nil {
			t.Fatal(said, err)
		}
		b.Expect(true, b.Other, "write-path", path, "that is new")
	}
	b.Expect(true, b.Other, "write-path", filepath.Join(folder, "moved", "in", "f"), "that came with a folder")
	link := filepath.Join(b.Root, "link")
	if err := os.Link(filepath.Join(folder, "g2"), link); err != nil {
		t.Fatal(err)
	}
	b.Expect(true, b.Other, "write-path", link, "by a name outside")
}

// TestGateFamily tries which programs are trusted, as TestFamily does at security hooks. The same are, but for scripts.
func TestGateFamily(t *testing.T) {
	b := newBench(t)
	f := b.NewFamily()
	f.IsByProc = true
	b.gate(ward{Policy: policy.Policy{Rules: f.Rules()}})
	f.Test(t)
}
