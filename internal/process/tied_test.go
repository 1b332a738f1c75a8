package process

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const tied = "SHUNT_TIED"

func TestMain(m *testing.M) {
	if os.Getenv(tied) != "" {
		c := exec.Command("cat")
		c.Stdout = os.Stdout
		if _, err := c.StdinPipe(); err != nil {
			panic(err)
		}
		if err := StartTied(c); err != nil {
			panic(err)
		}
		os.Exit(0) // without ending the child
	}
	os.Exit(m.Run())
}

// TestStartTied: the end of the thread that has asked for it does not end a command, and that of the process does.
func TestStartTied(t *testing.T) {
	c := exec.Command("cat")
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	c.Stdout = &out
	thread := make(chan int)
	var ask func()
	ask = func() {
		runtime.LockOSThread()              // never unlocked: the thread ends with the goroutine
		if unix.Gettid() == unix.Getpid() { // but the first one, which stays
			done := make(chan struct{})
			go func() { defer close(done); ask() }()
			<-done
			return
		}
		if err := StartTied(c); err != nil {
			t.Error(err)
		}
		thread <- unix.Gettid()
	}
	go ask()
	for task := fmt.Sprintf("/proc/self/task/%d", <-thread); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(task); os.IsNotExist(err) {
			break
		}
	}
	if _, err := io.WriteString(in, "there"); err != nil {
		t.Error(err)
	}
	if err := in.Close(); err != nil {
		t.Error(err)
	}
	if err := c.Wait(); err != nil || out.String() != "there" {
		t.Errorf("it ended with %v, and said %q", err, &out)
	}

	// Its output ends when nobody has it any more: not while the command lives.
	parent := exec.Command("/proc/self/exe")
	parent.Env = append(os.Environ(), tied+"=1")
	if text, err := parent.CombinedOutput(); err != nil || strings.TrimSpace(string(text)) != "" {
		t.Errorf("%v: %s", err, text)
	}
}
