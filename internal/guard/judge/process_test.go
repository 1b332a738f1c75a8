package judge

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"
)

// TestEnvironmentThatLoadsCode reads this process's own environment, and that of a process that was started with a
// variable that loads code.
func TestEnvironmentThatLoadsCode(t *testing.T) {
	for variable, want := range map[string]bool{"": true, "A=LD_PRELOAD": true, "LD_PRELOAD=": false, "PYTHONPATH=/x": false, "PYTHONUNBUFFERED=1": true, "BASH_ENV=x": false} {
		cmd := exec.Command("/bin/cat")
		cmd.Env = slices.DeleteFunc([]string{"B=1", variable}, func(string) bool { return variable == "" }) // none at all
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		id := cmd.Process.Pid
		// Linux 6.1 closes the files of the old program, for which Start waits, before the new one is in its place.
		for own := ExecutableOf(os.Getpid()); ExecutableOf(id) == own; {
			time.Sleep(time.Millisecond)
		}
		if got := plainEnvironment(id); got != want {
			t.Errorf("%s: plain %v, want %v", variable, got, want)
		}
		if parent, start, ok := origin(id); !ok || parent != os.Getpid() || start == 0 || nameless(id) {
			t.Errorf("parent %d, start %d, nameless %v", parent, start, nameless(id))
		}
		if err := errors.Join(in.Close(), cmd.Wait()); err != nil {
			t.Error(err)
		}
	}
	if _, _, ok := origin(0); ok || plainEnvironment(0) || !nameless(0) {
		t.Error("a process that there is not is trusted")
	}
}
