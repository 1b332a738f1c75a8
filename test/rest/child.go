package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"
)

// childArgument makes rest the program with which go test runs test binaries (-exec). A folder follows, and the
// binary with its arguments.
const childArgument = "run-for-go-test"

func isChild() bool { return len(os.Args) > 3 && os.Args[1] == childArgument }

// The files about a run of a test binary. They are below the session's folder, at the path of the package's folder,
// which is go test's working directory for the binary.
const (
	seenFile = "seen" // the files, folders and variables that it read
	usedFile = "used" // its CPU time
)

// becomeChild runs a test binary and ends this process.
func becomeChild() {
	pwd, err := os.Getwd()
	if err != nil {
		fmt.Fprintln(os.Stderr, "rest:", err)
		os.Exit(1)
	}
	os.Exit(child(filepath.Join(os.Args[2], pwd), os.Args[3:]))
}

// child runs a test binary, and returns its exit code.
func child(dir string, command []string) int {
	used, err := runChild(dir, command)
	if code := (*exec.ExitError)(nil); errors.As(err, &code) && code.ExitCode() > 0 {
		return code.ExitCode()
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, usedFile), []byte(used.String()), 0o600)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "rest:", err) // "signal: killed", for example
		return 1
	}
	return 0
}

// runChild returns the CPU time of the binary and all its children. Package os of the binary logs the files and
// variables that it reads, as it does for go test's own cache.
func runChild(dir string, command []string) (used time.Duration, err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return 0, err
	}
	c := exec.Command(command[0], append([]string{"-test.testlogfile=" + filepath.Join(dir, seenFile)}, command[1:]...)...)
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	runtime.LockOSThread() // the child is killed when the thread that started it ends
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGINT)
	if err := c.Start(); err != nil {
		return 0, err
	}
	go func() {
		for s := range signals {
			if s != syscall.SIGINT { // Ctrl-C reaches the binary itself
				_ = c.Process.Signal(s) // go test sends SIGQUIT when the time is over
			}
		}
	}()
	err = c.Wait()
	return c.ProcessState.UserTime() + c.ProcessState.SystemTime(), err
}

// tellUsed prints the packages that took most of the CPU time, and the rest for compiling and linking.
func (s *session) tellUsed(dir string, packages []*testee, whole time.Duration) {
	type one struct {
		name string
		used time.Duration
	}
	var all []one
	for _, p := range packages {
		text, err := os.ReadFile(filepath.Join(dir, p.Dir, usedFile))
		if err != nil {
			continue // it failed, or has no tests
		}
		used, err := time.ParseDuration(string(text))
		if err != nil {
			continue
		}
		all = append(all, one{s.short(p.Dir), used})
		whole -= used
	}
	slices.SortFunc(all, func(a, b one) int { return int(b.used - a.used) })
	for _, a := range all[:min(len(all), 20)] {
		fmt.Fprintf(s.out, "rest: %6.1f s of CPU time  %s\n", a.used.Seconds(), a.name)
	}
	fmt.Fprintf(s.out, "rest: %6.1f s of CPU time  compiling, linking, and packages that failed\n", whole.Seconds())
}
