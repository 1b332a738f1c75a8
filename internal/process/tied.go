package process

import (
	"os/exec"
	"runtime"
	"sync"
	"syscall"
)

// StartTied starts a command that the kernel kills when this process ends. The kernel kills it when the thread that has
// started it ends (prctl(2), PR_SET_PDEATHSIG), and Go ends threads, such as those of goroutines that end while they
// are locked to one. So commands are started by a thread that never ends. It has the process's namespaces, not those of
// the caller.
func StartTied(c *exec.Cmd) error {
	if c.SysProcAttr == nil {
		c.SysProcAttr = &syscall.SysProcAttr{}
	}
	c.SysProcAttr.Pdeathsig = syscall.SIGKILL
	started := make(chan error)
	starter() <- func() { started <- c.Start() }
	return <-started
}

// starter has calls made by a thread that is there as long as the process.
var starter = sync.OnceValue(func() chan<- func() {
	calls := make(chan func())
	go func() {
		runtime.LockOSThread()
		for call := range calls {
			call()
		}
	}()
	return calls
})
