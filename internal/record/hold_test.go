package record

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
)

// heldVariable has the path of the file that the test's own child has to hold.
const heldVariable = "SHUNT_TEST_HELD"

// TestHold: a living process keeps others out; a killed one does not, though the kernel takes its
// time to free its memory.
func TestHold(t *testing.T) {
	if path := os.Getenv(heldVariable); path != "" {
		holdUntilKilled(t, path)
		return
	}
	path := filepath.Join(t.TempDir(), "default.lock")
	for round := range 5 {
		child := exec.Command(os.Args[0], "-test.run", "^TestHold$")
		child.Env = append(os.Environ(), heldVariable+"="+path)
		child.Stderr = os.Stderr
		if _, err := child.StdinPipe(); err != nil {
			t.Fatal(err)
		}
		out, err := child.StdoutPipe()
		if err == nil {
			err = child.Start()
		}
		if err != nil {
			t.Fatal(err)
		}
		said, err := bufio.NewReader(out).ReadString('\n')
		if said != "held\n" {
			_ = child.Process.Kill()
			t.Fatalf("the child says %q, %v", said, errors.Join(err, child.Wait()))
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := Hold(f); !errors.Is(err, syscall.EWOULDBLOCK) || Holder(f) != fmt.Sprint(child.Process.Pid) {
			t.Errorf("round %d: while process %d has it: %v, and the holder is %q", round, child.Process.Pid, err, Holder(f))
		}
		if err := child.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := Hold(f); err != nil || Holder(f) != fmt.Sprint(os.Getpid()) {
			t.Errorf("round %d: just after it was killed: %v, and the holder is %q", round, err, Holder(f))
		}
		_ = child.Wait() // it was killed
		_ = f.Close()
	}
}

// holdUntilKilled has memory that takes the kernel a while to free.
func holdUntilKilled(t *testing.T, path string) {
	const memory = 256 << 20
	pages, err := syscall.Mmap(-1, 0, memory, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANONYMOUS|syscall.MAP_POPULATE)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err == nil {
		err = Hold(f)
	}
	if err != nil {
		t.Fatal(err)
	}
	fmt.Println("held")
	_, _ = io.Copy(io.Discard, os.Stdin) // it ends with the test, too
	_ = syscall.Munmap(pages)
}
