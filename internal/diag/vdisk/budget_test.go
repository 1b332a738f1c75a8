package vdisk

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/sensor"
)

// TestBudgetOfARecording has a limit that any sensor exceeds: the recorder detaches the sensors at system calls, then
// ends, and the recording and its report say so.
func TestBudgetOfARecording(t *testing.T) {
	need(t, "qemu-img", "qemu-io")
	path, _ := image(t, t.TempDir())
	q := openDrive(t, "-n", "-f", "qcow2", "-i", "threads", path)
	types, err := sensor.FindBTF("")
	if err != nil {
		t.Fatal(err)
	}
	recording := filepath.Join(t.TempDir(), "recording")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	var said bytes.Buffer
	ended := make(chan error, 1)
	go func() {
		ended <- Record(ctx, Options{BTF: types, PID: q.cmd.Process.Pid, Path: recording, Limit: 64 << 20, MaxCPU: 1e-9}, &said)
	}()
	for running := true; running; {
		select {
		case err = <-ended:
			running = false
		default:
			q.do("aio_write 16M 4k", "aio_flush")
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(recording)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	rec, err := Decode(file)
	if err != nil {
		t.Fatal(err)
	}
	var report bytes.Buffer
	if err := Of(rec).Print(&report, 1); err != nil {
		t.Fatal(err)
	}
	has := func(text string) bool {
		return slices.ContainsFunc(rec.Tail.Notes, func(note string) bool { return strings.Contains(note, text) }) && strings.Contains(said.String(), text) && strings.Contains(report.String(), text)
	}
	if !has(`the sensor "calls" is detached`) || !has(`the sensor "returns" is detached`) || !strings.Contains(rec.Tail.Ended, "cannot watch less") {
		t.Errorf("%+v\n%s\n%s", rec.Tail, said.String(), report.String())
	}
}
