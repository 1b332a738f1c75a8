package trial

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Task is the work of a copy of this binary that begins with a word instead of the name of a row: it prints "ready", and reads lines until its input ends.
type Task func(in *bufio.Reader, dir string)

// A thread that its parent traces has to be the first one of its process: another one stays, when it has ended, until
// the parent asks for it by its number, and so does the process.
func init() {
	if os.Getenv(operateVariable) != "" && os.Args[1] == "write-after-traceme" {
		runtime.LockOSThread()
	}
}

// operateVariable makes a copy of a test's binary operate.
const operateVariable = "SHUNT_GUARD_OPERATE"

// Operate does the task of this process, and reports whether it has one: a TestMain calls it first. tasks are those of the test beside the rows.
func Operate(tasks map[string]Task) bool {
	if os.Getenv(operateVariable) == "" {
		return false
	}
	operate(os.Args[1], os.Args[2], tasks)
	return true
}

// operate is the task of a copy of this binary: it gets ready, waits for a line, tries, and prints the result.
func operate(name, dir string, tasks map[string]Task) {
	w := &work{dir: dir}
	in := bufio.NewReader(os.Stdin)
	if name == "wait" {
		fmt.Println("ready")
		_, _ = in.ReadString('\n')
		return
	}
	if hammer, is := hammers[name]; is {
		hammer(in, dir)
		return
	}
	if task, is := tasks[name]; is {
		task(in, dir)
		return
	}
	row := rowOf(name)
	if run, is := strings.CutPrefix(name, "start "); is {
		row = newRow(name, func(w *work) error { return startRun(run, w.dir) })
	}
	if row == nil {
		fmt.Printf("there is no operation %q\n", name)
		os.Exit(2)
	}
	if row.before != nil {
		if err := row.before(w); err != nil {
			fmt.Println("before:", err)
			os.Exit(2)
		}
	}
	fmt.Println("ready")
	if _, err := in.ReadString('\n'); err != nil {
		os.Exit(2)
	}
	if err := row.attempt(w); err != nil {
		var errno unix.Errno
		errors.As(err, &errno)
		fmt.Printf("refused %d %v\n", int(errno), err)
		return
	}
	fmt.Println("done")
}

func newRow(name string, attempt func(*work) error) *Row { return &Row{Name: name, attempt: attempt} }

func rowOf(name string) *Row {
	for _, rows := range [][]Row{Matrix, Reads, onPath, asUsers, upgrades, deniable, Frees} {
		for i := range rows {
			if rows[i].Name == name {
				return &rows[i]
			}
		}
	}
	for i := range Controls {
		if Controls[i].Name == name {
			return &Controls[i].Row
		}
	}
	return nil
}

// hammers try an operation again and again until a line comes, and then print how often it worked and was refused.
var hammers = map[string]Task{
	"hammer-write": func(in *bufio.Reader, path string) {
		hammer(in, func() error { return OpenWrite(path, unix.O_WRONLY) })
	},
	"hammer-script": func(in *bufio.Reader, path string) {
		hammer(in, func() error { return startRun("script", path) })
	},
}

// hammerPause leaves the CPUs to the loads: in an emulated machine three hammers without it leave next to nothing.
const hammerPause = 5 * time.Millisecond

func hammer(in *bufio.Reader, attempt func() error) {
	fmt.Println("ready")
	end := make(chan error, 1)
	go func() {
		_, err := in.ReadString('\n')
		end <- err
	}()
	done, refused := 0, 0
	for {
		switch err := attempt(); {
		case err == nil:
			done++
		case errors.Is(err, unix.EPERM):
			refused++
		default:
			fmt.Println(err)
			return
		}
		select {
		case <-end:
			fmt.Printf("%d done, %d refused\n", done, refused)
			return
		case <-time.After(hammerPause):
		}
	}
}
