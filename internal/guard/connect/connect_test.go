package connect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/process"
)

// patient bounds waits for events that come soon.
const patient = 20 * time.Second

// bed is a cgroup, a bpffs, and two programs: copies of the test's binary.
type bed struct {
	testing.TB
	options        Options
	group          *os.File
	subject, other string
	attempts       chan Attempt
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newBed(t testing.TB, way Way) *bed {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	if way == LSM {
		needLSM(t)
	}
	folder, remove, err := lab.MakeCgroup(fmt.Sprintf("shunt-connect-%d", os.Getpid()))
	must(t, err)
	root, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	b := &bed{TB: t, options: Options{Root: filepath.Join(root, "bpf"), Cgroup: folder, Way: way}, subject: filepath.Join(root, "subject"), other: filepath.Join(root, "other"),
		attempts: make(chan Attempt, 1000)}
	must(t, os.Mkdir(b.options.Root, 0o700))
	b.group, err = os.Open(folder)
	must(t, err)
	text, err := os.ReadFile("/proc/self/exe")
	must(t, err)
	for _, path := range []string{b.subject, b.other} {
		must(t, os.WriteFile(path, text, 0o755))
	}
	t.Cleanup(func() {
		_, err := Stop(b.options.Root)
		if _, left := os.Stat(kernel.Home(b.options.Root)); !errors.Is(left, fs.ErrNotExist) {
			t.Errorf("pins are left: %v", left)
		}
		if unmountErr := unix.Unmount(b.options.Root, 0); !errors.Is(unmountErr, unix.EINVAL) { // it is not mounted
			err = errors.Join(err, unmountErr)
		}
		if t.Failed() { // a program may wait in it
			err = errors.Join(err, os.WriteFile(filepath.Join(folder, "cgroup.kill"), []byte("1"), 0))
		}
		err = errors.Join(err, b.group.Close())
		for until := time.Now().Add(patient); ; time.Sleep(time.Millisecond) {
			left := remove()
			if left == nil || !t.Failed() || time.Now().After(until) {
				err = errors.Join(err, left)
				break
			}
		}
		if err != nil {
			t.Error(err)
		}
	})
	return b
}

// needLSM skips where the kernel refuses programs at security hooks, as the machine that develops shunt does.
func needLSM(t testing.TB) {
	t.Helper()
	if os.Getenv("SHUNT_KERNEL_TEST") != "" {
		_ = unix.Mount("securityfs", "/sys/kernel/security", "securityfs", 0, "")
		return
	}
	c, err := CoverageHere([]policy.Connection{{Deny: policy.ConnectionOperations}})
	must(t, err)
	if c.Way != LSM {
		t.Skip(c.Why)
	}
}

// command is a program of the bed that does something in its cgroup, and in a network namespace of its own.
func (b *bed) command(program, words string) *exec.Cmd {
	c := exec.Command(program)
	c.Env = []string{doing + "=" + words}
	c.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(b.group.Fd()), Cloneflags: syscall.CLONE_NEWNET}
	return c
}

// does is the result of a program's deed.
func (b *bed) does(program, words string) string {
	b.Helper()
	c := b.command(program, words)
	var said, wrong strings.Builder
	c.Stdout, c.Stderr = &said, &wrong
	if err := c.Run(); err != nil || wrong.Len() > 0 {
		b.Fatalf("%s %s: %v %s", program, words, err, &wrong)
	}
	return strings.TrimSpace(said.String())
}

// wants has a program do something.
func (b *bed) wants(program, words, want string) {
	b.Helper()
	if got := b.does(program, words); got != want {
		b.Errorf("%s: %s: got %s, want %s", filepath.Base(program), words, got, want)
	}
}

// open has a policy in force.
func (b *bed) open(rules ...policy.Connection) *Denial {
	b.Helper()
	d, err := Open(policy.Policy{Connections: rules, IsDegraded: true}, b.options)
	must(b.TB, err)
	must(b.TB, d.Take())
	return d
}

// listen has the attempts of a policy come to the bed, until the returned function is called.
func (b *bed) listen(d *Denial) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- d.Listen(ctx, func(a Attempt) error { b.attempts <- a; return nil })
	}()
	return func() {
		cancel()
		if err := <-ended; err != nil {
			b.Error(err)
		}
	}
}

func (b *bed) attempt() Attempt {
	b.Helper()
	select {
	case a := <-b.attempts:
		return a
	case <-time.After(patient):
		b.Fatal("nothing was told")
		return Attempt{}
	}
}

func to(texts ...string) (all []policy.Target) {
	for _, text := range texts {
		t, problem := policy.ParseTarget(text)
		if problem != "" {
			panic(problem)
		}
		all = append(all, t)
	}
	return all
}

// everything is a rule for each operation.
func (b *bed) everything(mode string) []policy.Connection {
	rule := func(operation string, targets ...policy.Target) policy.Connection {
		return policy.Connection{Name: "no-" + operation, Program: b.subject, Deny: []string{operation}, To: targets, Mode: mode}
	}
	return []policy.Connection{
		rule(policy.Connect, to("127.0.0.0/8:7001-7002", "[::1]:7001-7002")...),
		rule(policy.Bind, to("127.0.0.1:7101", "[::1]:7101")...),
		rule(policy.Listen, to(":7201")...),
		rule(policy.Accept, to(":7301")...),
		rule(policy.Raw),
	}
}

// row is a deed, and the rules that deny it.
type row struct {
	deed, at  string
	operation string // that is denied; "": none
	only      Way    // that denies it; "": both
	told      string // address in the event, if it is not at; "-": none
}

func rows() []row {
	all := []row{
		{deed: "connect", at: "127.0.0.1:7003"},
		{deed: "connect", at: "[::1]:7000"},
		{deed: "send", at: "127.0.0.1:7003"},
		{deed: "disconnect", at: "127.0.0.1:7001"},
		{deed: "unix", at: "127.0.0.1:7001"},
		{deed: "connect", at: "127.9.9.9:7002", operation: policy.Connect},
		{deed: "bind", at: "127.0.0.1:7102"},
		{deed: "listen", at: "127.0.0.1:7202"},
		{deed: "listen-anywhere", at: "127.0.0.1:7201"},
		{deed: "accept", at: "127.0.0.1:7302"},
		{deed: "listen", at: "127.0.0.1:7201", operation: policy.Listen, only: LSM},
		{deed: "listen", at: "[::]:7201", operation: policy.Listen, only: LSM},
		{deed: "accept", at: "127.0.0.1:7301", operation: policy.Accept, only: LSM},
		{deed: "accept", at: "[::1]:7301", operation: policy.Accept, only: LSM},
		{deed: "raw", at: "127.0.0.1:0", operation: policy.Raw, told: "-"},
		{deed: "raw6", at: "127.0.0.1:0", operation: policy.Raw, told: "-"},
		{deed: "packet", at: "127.0.0.1:0", operation: policy.Raw, only: LSM, told: "-"},
		{deed: "xdp", at: "127.0.0.1:0", operation: policy.Raw, only: LSM, told: "-"},
		{deed: "send-unspecified", at: "127.0.0.1:7001", operation: policy.Connect},
		{deed: "connect-uring", at: "127.0.0.1:7001", operation: policy.Connect},
		{deed: "connect-polled", at: "127.0.0.1:7001", operation: policy.Connect},
		{deed: "connect-thread", at: "127.0.0.1:7001", operation: policy.Connect},
	}
	for _, deed := range []string{"connect", "connect-udp", "connect-mptcp", "send", "send-fast"} {
		for _, at := range []string{"127.0.0.1:7001", "[::1]:7001", "[::ffff:127.0.0.1]:7001", "0.0.0.0:7001", "[::]:7001", "[::ffff:0.0.0.0]:7001"} {
			all = append(all, row{deed: deed, at: at, operation: policy.Connect})
		}
	}
	for _, deed := range []string{"bind", "bind-udp"} {
		for _, at := range []string{"127.0.0.1:7101", "[::1]:7101", "[::ffff:127.0.0.1]:7101", "0.0.0.0:7101", "[::]:7101"} {
			all = append(all, row{deed: deed, at: at, operation: policy.Bind})
		}
	}
	return all
}

// TestOperations has a program that rules are about do each deed, and another one, which may.
func TestOperations(t *testing.T) {
	for _, way := range []Way{LSM, Cgroup} {
		t.Run(string(way), func(t *testing.T) {
			b := newBed(t, way)
			d := b.open(b.everything(policy.Deny)...)
			defer d.Close()
			if d.Coverage().Way != way {
				t.Fatalf("%+v", d.Coverage())
			}
			defer b.listen(d)()
			for _, r := range rows() {
				words := r.deed + " " + r.at
				denied := r.operation != "" && (r.only == "" || r.only == way)
				want := "done"
				if denied {
					want = "EPERM"
				}
				b.wants(b.subject, words, want)
				b.wants(b.other, words, "done")
				if denied {
					b.tells(r, b.attempt())
				}
			}
			select {
			case a := <-b.attempts:
				t.Errorf("it is told too: %v", a)
			default:
			}
			// SCTP takes addresses in ways at which the kernel calls no hook, and not every kernel has SCTP.
			if got := b.does(b.subject, "sctp 127.0.0.1:7003"); got == "done" || way == LSM && got != "EPERM" {
				t.Errorf("a socket of SCTP: %s", got)
			}
			if got := b.does(b.other, "sctp 127.0.0.1:7003"); got == "EPERM" {
				t.Errorf("a socket of SCTP of another program: %s", got)
			}
		})
	}
}

// tells checks the reported attempt of a row.
func (b *bed) tells(r row, a Attempt) {
	b.Helper()
	at := netip.MustParseAddrPort(r.at)
	address := netip.AddrPortFrom(at.Addr().Unmap(), at.Port()).String()
	switch {
	case r.told == "-":
		address = ""
	case r.deed == "connect-mptcp": // its socket is not made
		address = ""
	}
	if !a.Denied || a.Operation != r.operation || a.Address != address || !slices.Equal(a.Rules, []string{"no-" + r.operation}) || !strings.HasSuffix(a.Program, b.subject) || a.PID == 0 || a.Comm != "subject" && r.deed != "connect-polled" { // whose thread of the kernel has a name of its own
		b.Errorf("%s %s: told %+v", r.deed, r.at, a)
	}
}

// Exceptions are allowed, and nothing beside them.
func TestExceptions(t *testing.T) {
	for _, way := range []Way{LSM, Cgroup} {
		t.Run(string(way), func(t *testing.T) {
			b := newBed(t, way)
			rule := func(name, operation string, at, but []policy.Target) policy.Connection {
				return policy.Connection{Name: name, Program: b.subject, Deny: []string{operation}, To: at, Except: but, Mode: policy.Deny}
			}
			d := b.open(rule("out", policy.Connect, nil, to("127.0.0.1:7001", "[::1]:7001-7002", "0.0.0.0/0:7003")),
				rule("in", policy.Bind, to(":7101-7103"), to("127.0.0.1:7101", ":7102", "0.0.0.0/0:7103")))
			defer d.Close()
			for words, want := range map[string]string{
				"connect 127.0.0.1:7001": "done", "connect [::ffff:127.0.0.1]:7001": "done", "connect 127.0.0.2:7001": "EPERM", "connect 127.0.0.1:7002": "EPERM",
				"connect [::1]:7001": "done", "connect [::1]:7002": "done", "connect [::1]:7003": "EPERM", "send 127.0.0.1:7001": "done", "send 127.0.0.2:7001": "EPERM",
				// as a destination it is one of the two loopback addresses
				"connect 0.0.0.0:7001": "done", "connect [::]:7001": "done", "connect [::]:7002": "EPERM", "connect 127.0.0.1:7003": "done",
				// MPTCP takes addresses from its peer
				"connect-mptcp 127.0.0.1:7001": "EPERM",
				"bind 127.0.0.1:7101":          "done", "bind [::1]:7101": "EPERM", "bind 0.0.0.0:7101": "EPERM", "bind [::]:7101": "EPERM",
				"bind 127.0.0.1:7102": "done", "bind 0.0.0.0:7102": "done", "bind [::]:7102": "done", "bind 127.0.0.1:7103": "done", "bind 0.0.0.0:7103": "EPERM", "bind 127.0.0.1:7104": "done",
			} {
				b.wants(b.subject, words, want)
			}
			// Another policy without them: the same addresses are denied.
			second := b.open(rule("out", policy.Connect, nil, nil))
			defer second.Close()
			b.wants(b.subject, "connect 127.0.0.1:7001", "EPERM")
		})
	}
}

// In mode audit every attempt is allowed and reported, and in no other cgroup is it even reported.
func TestAudit(t *testing.T) {
	for _, way := range []Way{LSM, Cgroup} {
		t.Run(string(way), func(t *testing.T) {
			b := newBed(t, way)
			d := b.open(b.everything(policy.Audit)...)
			defer d.Close()
			defer b.listen(d)()
			c := b.command(b.subject, "connect 127.0.0.1:7001")
			c.SysProcAttr.UseCgroupFD = false
			if said, err := c.Output(); err != nil || strings.TrimSpace(string(said)) != "done" {
				t.Errorf("outside of the cgroup: %s %v", said, err)
			}
			b.wants(b.subject, "connect 127.0.0.1:7002", "done")
			if a := b.attempt(); a.Denied || a.Address != "127.0.0.1:7002" || a.Protocol != "TCP" || !strings.Contains(a.String(), "audited connect of 127.0.0.1:7002 (TCP) by ") {
				t.Errorf("%v", a)
			}
			if s, err := Look(b.options.Root); err != nil || s.Audited != 1 || s.Denied != 0 {
				t.Errorf("%+v %v", s, err)
			}
		})
	}
}

// A rule with children holds for the processes that its program starts, in spite of all their ways to leave it, also
// after another policy was loaded.
func TestChildren(t *testing.T) {
	for _, way := range []Way{LSM, Cgroup} {
		t.Run(string(way), func(t *testing.T) {
			b := newBed(t, way)
			const connects = "connect 127.0.0.1:7001"
			rule := policy.Connection{Name: "family", Program: b.subject, Children: true, Deny: []string{policy.Connect}, Mode: policy.Deny}
			alone := rule
			alone.Children = false

			before, sayBefore := b.waiting("start " + b.other + " wait " + connects)
			first := b.open(rule)
			b.wants(b.other, connects, "done")
			b.wants(b.subject, "start "+b.other+" "+connects, "EPERM")
			b.wants(b.subject, "start "+b.other+" start "+b.other+" "+connects, "EPERM")
			b.wants(b.subject, "orphan "+b.other+" "+connects, "EPERM")
			between, sayBetween := b.waiting("orphan-later " + b.other + " " + connects)

			killed, err := Open(policy.Policy{Connections: []policy.Connection{rule}}, b.options) // by a process that ends before it has them in force
			must(t, err)
			b.forget(killed.coll.Maps[connectMapShC_tasks])
			killed.Close()

			second := b.open(policy.Connection{Name: "unrelated", Program: b.other, Deny: []string{policy.Raw}, Mode: policy.Audit}, rule)
			first.Close()
			sayBefore()
			if got := before(); got != "EPERM" {
				t.Errorf("started before the first policy: %s", got)
			}
			sayBetween()
			if got := between(); got != "EPERM" {
				t.Errorf("started before the second policy, and left: %s", got)
			}

			third := b.open(alone)
			defer third.Close()
			second.Close()
			b.wants(b.subject, connects, "EPERM")
			b.wants(b.subject, "start "+b.other+" "+connects, "done")
		})
	}
}

// waiting has the subject start the other program, which waits until say is called; result then returns its word.
func (b *bed) waiting(words string) (result func() string, say func()) {
	b.Helper()
	c := b.command(b.subject, words)
	in, err := c.StdinPipe()
	must(b.TB, err)
	out, err := c.StdoutPipe()
	must(b.TB, err)
	before := b.running(b.other)
	must(b.TB, c.Start())
	for until := time.Now().Add(patient); b.running(b.other) == before; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			b.Fatalf("%s: it starts nothing", words)
		}
	}
	result = func() string {
		said, err := io.ReadAll(out)
		if err = errors.Join(err, c.Wait()); err != nil {
			b.Error(err)
		}
		return strings.TrimSpace(string(said))
	}
	return result, func() {
		if _, err := in.Write([]byte{'\n'}); err != nil {
			b.Error(err)
		}
	}
}

// forget removes all processes from a table.
func (b *bed) forget(tasks *ebpf.Map) {
	b.Helper()
	var all []connectGuardProcess
	var process connectGuardProcess
	var rules uint64
	for entries := tasks.Iterate(); entries.Next(&process, &rules); {
		all = append(all, process)
	}
	if len(all) == 0 {
		b.Fatal("no process is known")
	}
	for _, one := range all {
		must(b.TB, tasks.Delete(&one))
	}
}

// running is the number of processes that run a program.
func (b *bed) running(program string) (n int) {
	ids, err := process.All()
	must(b.TB, err)
	for _, id := range ids {
		if path, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", id)); err == nil && path == program {
			n++
		}
	}
	return n
}

// Open refuses by name the pins of another version, and Stop removes them.
func TestOtherLayouts(t *testing.T) {
	b := newBed(t, Cgroup)
	const connects = "connect 127.0.0.1:7001"
	rule := b.everything(policy.Deny)[0]
	b.open(rule).Close()
	home := kernel.Directory(b.options.Root, product)
	must(t, os.Rename(filepath.Join(home, layout), filepath.Join(home, "layout-0")))
	b.wants(b.subject, connects, "EPERM")
	_, openErr := Open(policy.Policy{Connections: []policy.Connection{rule}}, b.options)
	_, lookErr := Look(b.options.Root)
	for _, err := range []error{openErr, lookErr} {
		if err == nil || !strings.Contains(err.Error(), filepath.Join(home, "layout-0")+": end that with `shunt guard stop`") {
			t.Errorf("it is not refused: %v", err)
		}
	}
	if was, err := Stop(b.options.Root); !was || err != nil {
		t.Errorf("%v %v", was, err)
	}
	for until := time.Now().Add(patient); b.does(b.subject, connects) != "done"; { // the kernel releases links later
		if time.Now().After(until) {
			t.Fatal("it is denied yet")
		}
	}
}

// A policy stays in force without the process that loaded it, until Stop. A prepared policy that was never taken is not in
// force.
func TestLife(t *testing.T) {
	b := newBed(t, Cgroup)
	const connects = "connect 127.0.0.1:7001"
	rules := b.everything(policy.Deny)
	if s, err := Look(b.options.Root); s != nil || err != nil {
		t.Errorf("%+v %v", s, err)
	}
	if was, err := Stop(b.options.Root); was || err != nil {
		t.Errorf("%v %v", was, err)
	}

	_, err := Open(policy.Policy{Connections: rules}, b.options)
	var not *NotEnforced
	if !errors.As(err, &not) || len(not.Gaps) != 3 || !strings.Contains(err.Error(), `listen of rule "no-listen": the kernel calls no program of a cgroup for listen`) {
		t.Errorf("it is not refused: %v", err)
	}
	if s, err := Look(b.options.Root); s != nil || err != nil {
		t.Errorf("a refused policy left %+v %v", s, err)
	}

	d, err := Open(policy.Policy{Connections: rules, IsDegraded: true}, b.options)
	must(t, err)
	b.wants(b.subject, connects, "done") // not in force yet
	if s, err := Look(b.options.Root); s != nil || err != nil {
		t.Errorf("it is in force: %+v %v", s, err)
	}
	must(t, d.Drop())
	b.wants(b.subject, connects, "done")

	d = b.open(rules...)
	if len(d.Missing()) != 3 {
		t.Errorf("%+v", d.Missing())
	}
	d.Close()
	b.wants(b.subject, connects, "EPERM")
	s, err := Look(b.options.Root)
	must(t, err)
	if s.Way != Cgroup || !slices.Equal(s.Enforced, []string{policy.Connect, policy.Bind}) || !slices.Equal(s.Not, []string{policy.Listen, policy.Accept, policy.Raw}) || len(s.Rules) != 5 || s.Denied != 1 {
		t.Errorf("%+v", s)
	}

	next := b.open(rules[1]) // which is about bind alone
	defer next.Close()
	b.wants(b.subject, connects, "done")
	b.wants(b.subject, "bind 127.0.0.1:7101", "EPERM")
	if s, err := Look(b.options.Root); err != nil || s.Denied != 2 || s.Hooks != 3 {
		t.Errorf("%+v %v", s, err)
	}
	if was, err := Stop(b.options.Root); !was || err != nil {
		t.Errorf("%v %v", was, err)
	}
	b.wants(b.subject, "bind 127.0.0.1:7101", "done")
}

// A program that cannot be one is a fault, and nothing remains of the policy.
func TestProgramsThatAreNone(t *testing.T) {
	b := newBed(t, Cgroup)
	folder := filepath.Dir(b.subject)
	must(t, os.Symlink(b.subject, filepath.Join(folder, "link")))
	must(t, os.WriteFile(filepath.Join(folder, "script"), []byte("#!/bin/sh\n"), 0o755))
	must(t, os.WriteFile(filepath.Join(folder, "text"), []byte("text"), 0o644))
	for name, want := range map[string]string{"link": "leads through a symbolic link: write " + b.subject, "script": "is a script", "text": "is no program", "nothing": "no such file", "bpf": "is no program"} {
		_, err := Open(policy.Policy{Connections: []policy.Connection{{Name: "x", Program: filepath.Join(folder, name), Deny: []string{policy.Connect}, Mode: policy.Deny, At: "guard.yaml:3"}}}, b.options)
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), `rule "x" at guard.yaml:3`) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if all, err := generations(b.options.Root); len(all) > 0 || err != nil {
		t.Errorf("%v %v", all, err)
	}
}

// An operation that the explanation calls denied is denied.
func TestExplain(t *testing.T) {
	b := newBed(t, Cgroup)
	if e, err := Explain(b.options.Root, netip.MustParseAddrPort("127.0.0.1:7001"), os.Getpid()); e != nil || err != nil {
		t.Errorf("%+v %v", e, err)
	}
	rules := append(b.everything(policy.Deny), policy.Connection{Name: "family", Program: b.subject, Children: true, Deny: []string{policy.Connect}, To: to(":7009"), Mode: policy.Audit},
		policy.Connection{Name: "six", Program: b.subject, Deny: []string{policy.Accept}, To: to("::/0"), Mode: policy.Audit})
	result, say := b.waiting("start " + b.other + " wait connect 127.0.0.1:7003")
	pids := map[string]int{}
	ids, err := process.All()
	must(t, err)
	for _, id := range ids {
		path, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", id)) // it may end meanwhile
		pids[path] = id
	}
	d := b.open(rules...)
	defer d.Close()
	for _, c := range []struct {
		program, at string
		denied      []string // operations
		audited     []string
	}{
		{b.subject, "127.0.0.1:7001", []string{policy.Connect, policy.Raw}, nil},
		{b.subject, "127.0.0.1:7101", []string{policy.Bind, policy.Raw}, nil},
		{b.subject, "[::]:7001", []string{policy.Connect, policy.Raw}, []string{policy.Accept}},
		{b.subject, "[::1]:7002", []string{policy.Connect, policy.Raw}, []string{policy.Accept}},
		{b.subject, "[2001:db8::1]:7002", []string{policy.Raw}, []string{policy.Accept}},
		{b.subject, "192.0.2.1:7009", []string{policy.Raw}, []string{policy.Connect}},
		{b.other, "192.0.2.1:7009", nil, []string{policy.Connect}},
		{b.other, "127.0.0.1:7001", nil, nil},
	} {
		for _, ask := range []func() (*Explanation, error){
			func() (*Explanation, error) {
				return Explain(b.options.Root, netip.MustParseAddrPort(c.at), pids[c.program])
			},
			func() (*Explanation, error) {
				return ExplainPolicy(policy.Policy{Connections: rules}, netip.MustParseAddrPort(c.at), pids[c.program])
			},
		} {
			e, err := ask()
			must(t, err)
			var denied, audited []string
			for _, a := range e.Operations {
				if len(a.Denied) > 0 {
					denied = append(denied, a.Operation)
				}
				if len(a.Audited) > 0 {
					audited = append(audited, a.Operation)
				}
			}
			if !slices.Equal(denied, c.denied) || !slices.Equal(audited, c.audited) || e.Program != c.program {
				t.Errorf("%s, %s: %+v", filepath.Base(c.program), c.at, e)
			}
		}
	}
	say()
	if got := result(); got != "done" {
		t.Error(got)
	}
}
