package sensor_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/shunt-lb/shunt/internal/event/storm"
	"github.com/shunt-lb/shunt/sensor"
)

// A sensor that counts changes of this process's name, in the best way that the kernel has. bpf2go made the
// object; all its programs write to one map.
func Example() {
	spec, err := storm.LoadStorm()
	if err != nil {
		panic(err)
	}
	renames := sensor.Sensor{Name: "renames", Watches: "changes of a thread's name", Ways: []sensor.Way{
		{Kind: sensor.Fentry, Target: "__set_task_comm", Program: "sh_rename_fn"},
		{Kind: sensor.TPBTF, Target: "task_rename", Program: "sh_rename_btf", Loses: "renames by the kernel itself are not told apart"},
		{Kind: sensor.RawTP, Target: "task_rename", Program: "sh_rename_raw", Loses: "the kernel does not check the arguments' types"},
	}}
	set, err := sensor.Open(spec, []sensor.Sensor{renames}, sensor.Options{Constants: map[string]any{"only_tgid": uint32(os.Getpid())}})
	if err != nil {
		fmt.Println(err) // the refused ways, and the reasons
		return
	}
	defer set.Close()
	fmt.Println(set.Results[0]) // for example: renames: tp_btf task_rename, …; refused: fentry …

	var count uint64
	if err := set.Maps["sh_renames"].Lookup(uint32(0), &count); err != nil {
		panic(err)
	}
}

// TestExampleWorks runs the example where it can; its output differs by kernel.
func TestExampleWorks(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	Example()
}
