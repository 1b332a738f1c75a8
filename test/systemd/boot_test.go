package systemd

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// properties are the properties of a unit.
type properties map[string]string

// services are all services that systemd knows.
func services(t *testing.T) (all []properties) {
	t.Helper()
	out := sh(t, 0, "systemctl", "show", "--type=service", "--all", "-p", "Id,FragmentPath,ExecMainStartTimestampMonotonic", "*")
	for block := range strings.SplitSeq(out, "\n\n") {
		one := properties{}
		for line := range strings.Lines(block) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
			one[name] = value
		}
		all = append(all, one)
	}
	return all
}

func microseconds(t *testing.T, text string) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestBootUnderGuard boots a machine with the guard enabled: its folders are protected before the first service that is
// not of systemd itself, except a service that asks to start before the guard. Then the guard reads its policy again.
// This is the first test: the machine has just been booted (boot.sh).
func TestBootUnderGuard(t *testing.T) {
	needMachine(t)
	t.Cleanup(func() { _ = exec.Command("dpkg", "-P", "shunt").Run() })
	if state := guardProperty(t, "ActiveState"); state != "active" {
		t.Fatalf("after the boot the guard is %s\n%s", state, sh(t, 0, "journalctl", "-u", "shunt-guard", "--no-pager"))
	}
	for name, want := range map[string]string{"before": "written", "early": "refused", "ordinary": "refused"} {
		eventually(t, name+".service has run", func() error {
			_, err := os.Stat("/run/attempt." + name)
			return err
		})
		if word, err := os.ReadFile("/run/attempt." + name); err != nil || strings.TrimSpace(string(word)) != want {
			t.Errorf("%s.service's attempt: %q, %v; want %s", name, word, err, want)
		}
	}
	if text, err := os.ReadFile("/srv/data/f"); err != nil || string(text) != "kept\nbefore\n" {
		t.Errorf("what is protected: %q, %v", text, err)
	}

	protected := microseconds(t, guardProperty(t, "ActiveEnterTimestampMonotonic"))
	earlier := 0
	for _, s := range services(t) {
		began := s["ExecMainStartTimestampMonotonic"]
		if s["Id"] == "shunt-guard.service" || began == "" || began == "0" || microseconds(t, began) > protected {
			continue
		}
		earlier++
		if s["Id"] == "before.service" {
			continue
		}
		of, err := exec.Command("dpkg-query", "-S", s["FragmentPath"]).Output()
		if name, _, _ := strings.Cut(string(of), ":"); err != nil || name != "systemd" && name != "udev" {
			t.Errorf("%s began before the guard was ready: its file is %s, of the package %q", s["Id"], s["FragmentPath"], name)
		}
	}
	t.Logf("protected %d µs after the kernel's start, and %d services had begun by then", protected, earlier)
	if earlier < 2 { // before.service, and the journal
		t.Errorf("only %d services began before the guard: the comparison says nothing", earlier)
	}

	readAgain(t)
}

// readAgain makes the guard of the boot read a policy of two folders.
func readAgain(t *testing.T) {
	t.Helper()
	if err := write("/srv/more/f"); err != nil {
		t.Errorf("before the policy has the folder: %v", err)
	}
	both := strings.Replace(fmt.Sprintf(guardPolicy, "deny"), "[/srv/data]", "[/srv/data, /srv/more]", 1)
	if err := os.WriteFile(guardFile, []byte(both), 0o600); err != nil {
		t.Fatal(err)
	}
	pid, w := guardProperty(t, "MainPID"), beginWriting("/srv/data/f")
	sh(t, 0, "systemctl", "reload", "shunt-guard")
	eventually(t, "the reload's new folder is protected", func() error {
		if err := write("/srv/more/f"); !errors.Is(err, unix.EPERM) {
			return fmt.Errorf("a write: %v", err)
		}
		return nil
	})
	w.stop(t, "while the policy was read again")
	if now := guardProperty(t, "MainPID"); now != pid {
		t.Errorf("the reload has started another process: %s, before %s", now, pid)
	}
}
