package demo

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/judge"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/machine"
	"github.com/shunt-lb/shunt/internal/process"
	"github.com/shunt-lb/shunt/internal/story"
)

// stage tells the story. The guard protects only its folder.
//
//	FOLDER/bank/accounts           the data
//	FOLDER/bank/bin/ledger         the business program
//	FOLDER/bank/bin/close-day      a script that it starts, which starts
//	FOLDER/bank/bin/write-total    a script that changes the data
//	FOLDER/ledger                  a copy of the program
//	FOLDER/letters                 files of people, with decoys
//	FOLDER/intruder                the intruder's program
//	FOLDER/tool                    a program that nobody may execute
type stage struct {
	*story.Teller
	folder  string
	self    string // path of shunt
	facts   Facts
	guard   *exec.Cmd
	told    chan line
	refused int            // attempts
	found   []detect.Found // that were reported while something else was awaited
}

// line is a line of the guard: an attempt, or a finding of detection or decoys.
type line struct {
	judge.Attempt
	Found *detect.Found `json:"found"`
}

// Stage plays the story in a folder, in its own mount namespace, and writes it with the facts to out.
func Stage(ctx context.Context, folder string, out io.Writer) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the shunt binary: %w", err)
	}
	if folder, err = filepath.EvalSymlinks(folder); err != nil {
		return fmt.Errorf("look for the demo's folder: %w", err)
	}
	if err := ownPlaces(folder); err != nil {
		return err
	}
	if err := unix.Mount("bpf", kernel.DefaultPinRoot, "bpf", 0, ""); err != nil {
		return fmt.Errorf("give the demo pins of its own: mount bpf on %s: %w", kernel.DefaultPinRoot, err)
	}
	s := &stage{Teller: story.NewTeller(out), folder: folder, self: self, told: make(chan line, 100), facts: Facts{Attempts: []judge.Attempt{}}}
	err = s.Tell(ctx,
		story.Step("A bank's accounts, without protection", s.build),
		story.Step("The guard protects the folder", s.protect),
		story.Step("Who may change the accounts now", s.try),
		story.Step("The guard's reports", s.listen),
		story.Step("A shell for somebody on another machine", s.shell),
		story.Step("A program that encrypts files", s.encryptor),
		story.Step("The guard is killed", s.kill),
		story.Step("The protection ends", s.end),
	)
	if err != nil && ctx.Err() == nil {
		s.Claim(false, "%v", err)
	}
	s.facts.Claims = s.Claims
	s.facts.Kernel = release()
	text, encodeErr := json.Marshal(map[string]any{"kernel": s.facts.Kernel, "attempts": s.facts.Attempts, "claims": s.facts.Claims})
	_, writeErr := fmt.Fprintf(out, "%s%s\n", separator, text)
	return errors.Join(encodeErr, writeErr)
}

func release() string {
	var name unix.Utsname
	_ = unix.Uname(&name) // cannot fail
	return unix.ByteSliceToString(name.Release[:])
}

func (s *stage) path(name string) string { return filepath.Join(s.folder, name) }

const opening = "alice 100\nbob 50\n"

// build makes the folder, and shows that nothing protects it.
func (s *stage) build(ctx context.Context) error {
	if err := os.MkdirAll(s.path("bank/bin"), 0o755); err != nil {
		return err
	}
	program, err := os.ReadFile(s.self)
	if err != nil {
		return err
	}
	shell := "#!/bin/sh\n"
	for _, file := range []struct {
		name, text string
		mode       os.FileMode
	}{
		{"bank/accounts", opening, 0o644},
		{"bank/bin/ledger", string(program), 0o755},
		{"ledger", string(program), 0o755},
		{"bank/bin/close-day", shell + s.path("bank/bin/write-total") + " \"$1\"\n", 0o755},
		{"bank/bin/write-total", shell + "echo total 150 >> \"$1\"\n", 0o755},
		{"guard.yaml", s.policy(), 0o644},
		{"intruder", string(program), 0o755},
		{"tool", string(program), 0o755},
	} {
		if err := os.WriteFile(s.path(file.name), []byte(file.text), file.mode); err != nil {
			return err
		}
	}
	if err := s.writeLetters(); err != nil {
		return err
	}
	s.Say("  bank/accounts           the data\n  bank/bin/ledger         the program that keeps it\n" +
		"  bank/bin/close-day      a script that ledger starts, which starts bank/bin/write-total\n  ledger                  a copy of the program, outside\n  letters                 files of people\n\n")
	edited := s.attempt(ctx, false, "an editor changes them", "sed", "-i", "s/100/999/", s.path("bank/accounts"))
	return errors.Join(edited, os.WriteFile(s.path("bank/accounts"), []byte(opening), 0o644))
}

func (s *stage) policy() string {
	return fmt.Sprintf(`guard:
  protect:
    - name: accounts
      paths: [%s]
      deny: [write, create, delete, rename, link, chmod]
      trust: {programs: [%s], children: true}
      mode: deny
  detect:                               # by built-in rules, and two more
    rules:
      - {name: tool, on: exec, if: process.program == '%s', action: deny}
      - name: shell
        on: dup
        if: process.program == '%s' && stdin.kind == 'inet' && stdout.kind == 'inet' && stdin.direction == 'out'
        action: kill
  decoys:
    - {folders: [%s], action: stop}
`, s.path("bank"), s.path("bank/bin/ledger"), s.path("tool"), s.path("intruder"), s.path("letters"))
}

// protect starts the guard as a user does.
func (s *stage) protect(ctx context.Context) error {
	s.Say("%s\n", indented(s.policy()))
	s.Say("  $ shunt guard run --policy guard.yaml\n")
	s.guard = exec.CommandContext(ctx, s.self, "guard", "run", "--policy", s.path("guard.yaml"), "-o", "json")
	out, err1 := s.guard.StdoutPipe()
	notes, err2 := s.guard.StderrPipe()
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	if err := process.StartTied(s.guard); err != nil {
		return fmt.Errorf("start the guard: %w", err)
	}
	go func() {
		defer close(s.told)
		for lines := json.NewDecoder(out); ; {
			var l line
			if lines.Decode(&l) != nil {
				return
			}
			s.told <- l
		}
	}()
	var said strings.Builder
	isProtected := false
	for lines := bufio.NewReader(notes); ; {
		line, err := lines.ReadString('\n')
		said.WriteString(line)
		if strings.Contains(line, "protected from now on") {
			s.Say("    %s", line)
			isProtected = true
		}
		if strings.Contains(line, "Watching ") { // the last line of the start
			s.Say("    %s", line)
			go io.Copy(io.Discard, lines) //nolint:errcheck // so that the guard does not wait
			s.Claim(isProtected, "the folder is protected, with all files in it")
			return nil
		}
		if err != nil {
			return fmt.Errorf("the guard ended: %w. It said:\n%s", s.guard.Wait(), said.String())
		}
	}
}

// try lets programs change the data.
func (s *stage) try(ctx context.Context) error {
	accounts := s.path("bank/accounts")
	s.Say("  All of them are run by root (user %d).\n\n", os.Geteuid())
	for _, one := range []struct {
		isRefused bool
		text      string
		command   []string
	}{
		{true, "an editor is refused", []string{"sed", "-i", "s/100/999/", accounts}},
		{true, "a shell is refused", []string{"sh", "-c", "echo mallory 999 >> " + accounts}},
		{false, "the business program is allowed", append([]string{s.path("bank/bin/ledger")}, ledger("carol 10", accounts)...)},
		{false, "a script that a script of it starts is allowed", append([]string{s.path("bank/bin/ledger")}, starts(s.path("bank/bin/close-day"), accounts)...)},
		{true, "the same script is refused when another program starts it", []string{s.path("bank/bin/close-day"), accounts}},
		{true, "a copy of the business program is refused", append([]string{s.path("ledger")}, ledger("mallory 999", accounts)...)},
		{true, "the business program cannot be replaced", []string{"sh", "-c", "cat " + s.path("ledger") + " > " + s.path("bank/bin/ledger")}},
		{true, "a program that a rule denies is not executed", []string{"sh", "-c", s.path("tool")}},
	} {
		if err := s.attempt(ctx, one.isRefused, one.text, one.command[0], one.command[1:]...); err != nil {
			return err
		}
	}
	text, err := os.ReadFile(accounts)
	if err != nil {
		return err
	}
	s.Claim(string(text) == opening+"carol 10\ntotal 150\n", "the accounts are what the business made of them: %q", text)
	return nil
}

// attempt runs a program that changes a file, and claims that it is refused, or is not.
func (s *stage) attempt(ctx context.Context, isRefused bool, claim, program string, args ...string) error {
	shown := strings.ReplaceAll(strings.Join(append([]string{program}, quoted(args)...), " "), s.folder+"/", "")
	s.Say("  $ %s\n", shown)
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = []string{"PATH=" + searched} // variables that load code into a program would take its trust
	said, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return fmt.Errorf("run %s: %w", program, err)
	}
	if len(said) > 0 {
		s.Say("%s\n", indented(strings.ReplaceAll(string(bytes.TrimSpace(said)), s.folder+"/", "")))
	}
	if isRefused {
		s.refused++
		s.Claim(err != nil && strings.Contains(strings.ToLower(string(said)), unix.EPERM.Error()), "%s", claim)
	} else {
		s.Claim(err == nil, "%s", claim)
	}
	return ctx.Err()
}

// hear reads a line of the guard, and notes it.
func (s *stage) hear(ctx context.Context) (line, error) {
	select {
	case l, is := <-s.told:
		switch {
		case !is:
			return l, fmt.Errorf("the guard ended: %w", s.guard.Wait())
		case l.Found != nil:
			s.found = append(s.found, *l.Found)
		default:
			s.facts.Attempts = append(s.facts.Attempts, l.Attempt)
		}
		return l, nil
	case <-ctx.Done():
		return line{}, context.Cause(ctx)
	}
}

// listen waits until the guard has reported each refusal.
func (s *stage) listen(ctx context.Context) error {
	for want := s.refused; len(s.facts.Attempts) < want; {
		l, err := s.hear(ctx)
		if err != nil {
			return fmt.Errorf("the guard reported %d of %d refusals: %w", len(s.facts.Attempts), want, err)
		}
		if l.Found == nil {
			s.Say("  %s\n", strings.ReplaceAll(l.Attempt.String(), s.folder+"/", ""))
		}
	}
	right := 0
	for _, a := range s.facts.Attempts {
		if a.Denied && strings.HasPrefix(a.Path, s.folder) && len(a.Rules) > 0 && a.PID > 0 {
			right++
		}
	}
	s.Say("\n")
	s.Claim(right == s.refused, "each of the %d refusals was reported, with the operation, the file, the program and the rule", s.refused)
	return nil
}

// kill kills the guard.
func (s *stage) kill(ctx context.Context) error {
	if err := s.guard.Process.Kill(); err != nil {
		return err
	}
	_ = s.guard.Wait() // it was killed
	s.Say("  $ kill -9 %d\n", s.guard.Process.Pid)
	if err := s.attempt(ctx, true, "the editor is still refused", "sed", "-i", "s/100/999/", s.path("bank/accounts")); err != nil {
		return err
	}
	status, err := exec.CommandContext(ctx, s.self, "guard", "status").Output()
	if err != nil {
		return fmt.Errorf("read the guard's status: %w", err)
	}
	s.Say("  $ shunt guard status\n%s\n", indented(strings.ReplaceAll(string(bytes.TrimSpace(status)), s.folder+"/", "")))
	s.Claim(bytes.Contains(status, []byte("No `shunt guard run` has run for")), "`shunt guard status` says since when no guard has run")
	return nil
}

// end removes the protection.
func (s *stage) end(ctx context.Context) error {
	s.Say("  $ shunt guard stop\n")
	said, err := exec.CommandContext(ctx, s.self, "guard", "stop").CombinedOutput()
	if err != nil {
		return fmt.Errorf("end the protection: %w: %s", err, said)
	}
	s.Say("%s\n", indented(string(bytes.TrimSpace(said))))
	return s.attempt(ctx, false, "the editor changes the accounts", "sed", "-i", "s/100/999/", s.path("bank/accounts"))
}

// searched are the folders of the story's programs.
const searched = "/usr/sbin:/usr/bin:/sbin:/bin"

func indented(text string) string {
	return "    " + strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n    ")
}

func quoted(args []string) (words []string) {
	for _, word := range args {
		if strings.ContainsAny(word, " >") {
			word = "'" + word + "'"
		}
		words = append(words, word)
	}
	return words
}

// awaitDrained waits until a serial line has sent everything (TCSBRK with argument 1, tty_ioctl(4)).
func awaitDrained(line *os.File) { _ = unix.IoctlSetInt(int(line.Fd()), unix.TCSBRK, 1) }

// Machine runs Stage as the first process of a virtual machine, which it switches off at the end.
func Machine(ctx context.Context) {
	line, err := prepare()
	if err == nil {
		err = Stage(ctx, "/tmp", line)
		awaitDrained(line)
	}
	if err != nil {
		fmt.Println("shunt:", err) // the console
	}
	awaitDrained(os.Stdout)
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART) // qemu's -no-reboot ends here
	select {}
}

// prepare mounts the file systems that a bare machine needs, and opens the line for the story.
func prepare() (*os.File, error) {
	if err := os.Setenv("PATH", searched); err != nil {
		return nil, err
	}
	if err := machine.Mount([][2]string{{"devtmpfs", "/dev"}, {"proc", "/proc"}, {"sysfs", "/sys"}, {"tmpfs", "/tmp"}, {"securityfs", "/sys/kernel/security"}}...); err != nil {
		return nil, err
	}
	return os.OpenFile("/dev/ttyS1", os.O_WRONLY|unix.O_NOCTTY, 0)
}
