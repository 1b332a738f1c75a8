package demo

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/decoy"
	"github.com/shunt-lb/shunt/internal/guard/detect"
	"github.com/shunt-lb/shunt/internal/guard/rule"
	"github.com/shunt-lb/shunt/internal/process"
)

// farAddress is the other machine's address, from RFC 5737. It belongs to the stage's own network, and is no loopback address.
const farAddress = "192.0.2.1"

// ownPlaces mounts memory, for the stage alone, where the guard keeps its lock, its socket and its journal of decoys.
func ownPlaces(folder string) error {
	for _, place := range []string{"/run", "/var/lib"} {
		if strings.HasPrefix(folder, place+"/") {
			return fmt.Errorf("the demo puts a file system of its own at %s, and its folder %s is there: choose another one with TMPDIR", place, folder)
		}
		if err := os.MkdirAll(place, 0o755); err != nil { // a virtual machine has no such folder
			return fmt.Errorf("make %s: %w", place, err)
		}
		if err := unix.Mount("tmpfs", place, "tmpfs", 0, "mode=755"); err != nil {
			return fmt.Errorf("give the demo a lock and a journal of its own: mount tmpfs on %s: %w", place, err)
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err == nil {
		err = netlink.AddrReplace(lo, &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(farAddress).To4(), Mask: net.CIDRMask(32, 32)}})
	}
	if err != nil {
		return fmt.Errorf("make the network of the demo: %w", err)
	}
	return nil
}

// letter is the contents of each letter.
const letter = "Dear Sir or Madam,\n"

// letterCount is the number of letters.
const letterCount = 20

func (s *stage) writeLetters() error {
	if err := os.MkdirAll(s.path("letters"), 0o755); err != nil {
		return err
	}
	for i := range letterCount {
		if err := os.WriteFile(s.path(fmt.Sprintf("letters/letter %02d.txt", i+1)), []byte(letter), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// harmed returns the number of letters that have changed.
func (s *stage) harmed() (count int) {
	for i := range letterCount {
		if text, err := os.ReadFile(s.path(fmt.Sprintf("letters/letter %02d.txt", i+1))); err != nil || string(text) != letter {
			count++
		}
	}
	return count
}

// intruder starts the intruder's program, in a process group of its own, like a job of a shell.
func (s *stage) intruder(ctx context.Context, way, target string) (*exec.Cmd, error) {
	arguments := []string{"demo", "guard-intruder", way, target}
	s.Say("  $ %s\n", strings.ReplaceAll(strings.Join(append([]string{s.path("intruder")}, quoted(arguments)...), " "), s.folder+"/", ""))
	cmd := exec.CommandContext(ctx, s.path("intruder"), arguments...)
	cmd.Env = []string{"PATH=" + searched}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := process.StartTied(cmd); err != nil {
		return nil, fmt.Errorf("start an intruder: %w", err)
	}
	return cmd, nil
}

// await waits until a rule has found a process.
func (s *stage) await(ctx context.Context, name string, pid int) (detect.Found, error) {
	is := func(f detect.Found) bool { return f.Rule == name && f.Event.Process.PID == uint32(pid) }
	for _, f := range s.found {
		if is(f) {
			return f, nil
		}
	}
	for {
		l, err := s.hear(ctx)
		if err != nil {
			return detect.Found{}, fmt.Errorf("wait until the guard tells of process %d by the rule %s: %w", pid, name, err)
		}
		if l.Found != nil && is(*l.Found) {
			return *l.Found, nil
		}
	}
}

// sayFound prints an alert.
func (s *stage) sayFound(f detect.Found) {
	s.Say("    %s\n", strings.ReplaceAll(f.String(), s.folder+"/", ""))
}

// tells returns the number of reports on a process.
func (s *stage) tells(pid int) (count int) {
	for _, f := range s.found {
		if f.Event.Process.PID == uint32(pid) && f.Action != rule.Log {
			count++
		}
	}
	return count
}

// shell lets an intruder give another machine a shell. The other machine sends nothing, so the shell would wait without
// end.
func (s *stage) shell(ctx context.Context) error {
	far, err := net.Listen("tcp", farAddress+":4444")
	if err != nil {
		return fmt.Errorf("listen as the other machine: %w", err)
	}
	defer far.Close() //nolint:errcheck // the demo's
	accepted := make(chan net.Conn, 2)
	go func() {
		for {
			conn, err := far.Accept()
			if err != nil {
				return
			}
			accepted <- conn
		}
	}()
	peer := func() (net.Conn, error) {
		select {
		case conn := <-accepted:
			return conn, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	s.Say("  %s is the other machine.\n\n", farAddress)
	client, err := s.intruder(ctx, wayClient, far.Addr().String())
	if err != nil {
		return err
	}
	conn, err := peer()
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(conn, "hello")
	clientErr := errors.Join(err, conn.Close(), client.Wait())
	intruder, err := s.intruder(ctx, wayShell, far.Addr().String())
	if err != nil {
		return err
	}
	if conn, err = peer(); err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // the demo's
	caught, err := s.await(ctx, "reverse-shell", intruder.Process.Pid)
	if err != nil {
		return err
	}
	ended, err := s.await(ctx, "shell", intruder.Process.Pid)
	if err != nil {
		return err
	}
	s.sayFound(caught)
	s.sayFound(ended)
	var exit *exec.ExitError
	err = intruder.Wait()
	isKilled := errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL
	s.Say("\n")
	// The events of the client came before these.
	s.Claim(clientErr == nil && s.tells(client.Process.Pid) == 0, "a program that only connects and reads causes no alert: %d alerts, %v", s.tells(client.Process.Pid), clientErr)
	s.Claim(caught.Event.FDs[0].Remote == farAddress && caught.Severity == "critical", "the reverse shell is caught, by a built-in rule, with the other machine's address")
	s.Claim(isKilled && ended.Done == "killed", "the rule of the policy has ended it: %s", ended.Done)
	return ctx.Err()
}

// encryptor lets an intruder write over the letters.
func (s *stage) encryptor(ctx context.Context) error {
	s.Say("  Among the %d letters there are decoys.\n\n", letterCount)
	backup, err := s.intruder(ctx, wayBackUp, s.path("letters"))
	if err != nil {
		return err
	}
	backupErr := backup.Wait()
	intruder, err := s.intruder(ctx, wayEncrypt, s.path("letters"))
	if err != nil {
		return err
	}
	stopped, err := s.await(ctx, decoy.RuleEncryptor, intruder.Process.Pid)
	if err != nil {
		return err
	}
	s.sayFound(stopped)
	isStopped, err := awaitStop(intruder.Process.Pid)
	if err != nil {
		return fmt.Errorf("look at the encryptor: %w", err)
	}
	harmed := s.harmed()
	s.Say("\n  $ shunt guard decoys kill %d\n", intruder.Process.Pid)
	said, killErr := exec.CommandContext(ctx, s.self, "guard", "decoys", "kill", fmt.Sprint(intruder.Process.Pid)).CombinedOutput()
	s.Say("%s\n", indented(string(bytes.TrimSpace(said))))
	if killErr != nil {
		_ = intruder.Process.Kill()
	}
	_ = intruder.Wait() // it was killed
	encrypted := 0
	for _, f := range s.found {
		if f.Rule == decoy.RuleEncryptor && f.Event.Process.PID == uint32(backup.Process.Pid) {
			encrypted++
		}
	}
	s.Claim(backupErr == nil && encrypted == 0, "a backup that reads all of them is not stopped: %v", backupErr)
	s.Claim(isStopped && strings.HasPrefix(stopped.Done, "stopped"), "the encryptor is stopped at the first decoys")
	s.Claim(harmed == 0 && s.harmed() == 0, "%d of the %d letters are harmed", harmed, letterCount)
	s.Claim(killErr == nil, "a person decides about the stopped program")
	return ctx.Err()
}

// stopsFor bounds the time until a process stops after the signal: it has to get a CPU first.
const stopsFor = 10 * time.Second

// awaitStop waits until a process is stopped, and reports whether it is.
func awaitStop(pid int) (isStopped bool, err error) {
	for end := time.Now().Add(stopsFor); ; time.Sleep(10 * time.Millisecond) {
		stat, err := process.ReadStat(pid)
		if err != nil || stat.State() == "T" || time.Now().After(end) {
			return err == nil && stat.State() == "T", err
		}
	}
}
