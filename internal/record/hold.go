package record

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/internal/process"
)

const (
	// endingMax bounds the wait for a process that is ending. To free the memory of 50,000 backends
	// took tens of milliseconds; a call in the kernel that waits for RCU takes longer.
	endingMax = 10 * time.Second
	// between two looks, of which there are at least so many: between the signal's being taken and
	// the process's being marked as ending there is a moment in which nothing shows it, and a
	// holder writes its number down just after it has taken hold.
	lookEvery  = 10 * time.Millisecond
	looksLeast = 5
	// holderBytesMax is more than a process number has.
	holderBytesMax = 32
)

// Hold takes hold of a file that is open for reading and writing, and writes this process's number
// into it. While another process has it that is syscall.EWOULDBLOCK, and Holder returns that
// process. The kernel releases the file with the process, however that ends; but a killed process
// ends only when the kernel has taken it apart, so a process that is ending is waited for.
func Hold(f *os.File) error {
	deadline := time.Now().Add(endingMax)
	for looks := 1; ; looks++ {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			if f.Truncate(0) == nil {
				_, _ = f.WriteAt(fmt.Appendln(nil, os.Getpid()), 0) // for people; only the lock counts
			}
			return nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return err
		}
		if looks >= looksLeast && (!ending(Holder(f)) || time.Now().After(deadline)) {
			return err
		}
		time.Sleep(lookEvery)
	}
}

// Holder is the number of the process that has hold of a file, or that had it last; empty where
// none is written down.
func Holder(f *os.File) string {
	text, _ := io.ReadAll(io.NewSectionReader(f, 0, holderBytesMax))
	return strings.TrimSpace(string(text))
}

// ending reports whether a process was killed, or has begun to end, and may not be gone yet.
func ending(holder string) bool {
	pid, err := strconv.Atoi(holder)
	if err != nil || pid <= 0 || pid == os.Getpid() {
		return false
	}
	stat, err := process.ReadStat(pid)
	if err != nil {
		return false
	}
	flags, err := stat.Number(process.Flags)
	if err != nil {
		return false
	}
	if stat.State() == "Z" || stat.State() == "X" || flags&process.Exiting != 0 {
		return true
	}
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(status)) {
		pending, found := strings.CutPrefix(line, "SigPnd:") // of the first thread: all have it
		if signals, err := strconv.ParseUint(strings.TrimSpace(pending), 16, 64); found && err == nil {
			return signals&(1<<(syscall.SIGKILL-1)) != 0
		}
	}
	return false
}
