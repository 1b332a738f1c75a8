package protect

import (
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/trial"
)

func TestMain(m *testing.M) {
	if trial.Operate(map[string]trial.Task{"agent": agent}) {
		return
	}
	if os.Getenv("SHUNT_GUARD_ENFORCES") != "" {
		fmt.Println(Enforces())
		return
	}
	os.Exit(m.Run())
}

// inGuest reports whether this is a virtual machine of test/kernel, where all of this has to work.
func inGuest() bool { return os.Getenv("SHUNT_KERNEL_TEST") != "" }

// needLSM skips where the kernel refuses programs at security hooks, as the machine that develops shunt does.
func needLSM(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	if inGuest() {
		_ = unix.Mount("securityfs", "/sys/kernel/security", "securityfs", 0, "")
		return
	}
	err := Enforces()
	var refused *Refusal
	if errors.As(err, &refused) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
}
