package process

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// Pinned is, by CPU, the number of threads of a process that may run there and nowhere else (sched_setaffinity(2)). A
// thread that ends meanwhile does not count. It needs no rights over the process.
func Pinned(pid int) (map[int]int, error) {
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return nil, err
	}
	pinned := map[int]int{}
	for _, t := range threads {
		id, err := strconv.Atoi(t.Name())
		if err != nil {
			continue
		}
		var may unix.CPUSet
		switch err := unix.SchedGetaffinity(id, &may); {
		case errors.Is(err, unix.ESRCH):
			continue
		case err != nil:
			return nil, fmt.Errorf("read the CPUs of thread %d of process %d: %w", id, pid, err)
		}
		if may.Count() != 1 {
			continue
		}
		for cpu := range len(may) * strconv.IntSize {
			if may.IsSet(cpu) {
				pinned[cpu]++
			}
		}
	}
	return pinned, nil
}
