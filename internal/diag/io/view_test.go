package io

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
	"github.com/shunt-lb/shunt/test/golden"
)

// shown is an interval with each kind of row.
func shown() Interval {
	return Interval{
		Time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Seconds: 2, Bytes: 4 << 20, UnattributedBytes: 1 << 20, MissedBytes: 4096, MissedCount: 1, Sample: 1, NotRun: map[string]uint64{"disks": 2}, ReadsUnseen: 5, WritesUnseen: 2,
		Disks: []Disk{{Name: "sdx", ReadRate: 1.5, WriteRate: 100, ReadBytes: 4096, WriteBytes: 1 << 20, Wait: 2.5, ReadWait: 1, WriteWait: 3, Device: 2, Util: 50}},
		Rows: []Row{
			{Comm: "dd", PID: 100, Writes: 16, WriteBytes: 2 << 20, Inode: 12, Device: "sdx", Path: "/data/a b\x1b[2J", Container: strings.Repeat("0123456789abcdef", 4)},
			{Comm: "kworker/u8:1", PID: 7, Writes: 8, WriteBytes: 1 << 20, Inode: 13, Device: "sdx", Path: "/data/old (deleted)", Unattributed: true},
			{Comm: "dd", PID: 100, Reads: 4, ReadBytes: 16384, Device: "sdx", Path: "-"},
		},
	}
}

func run(t *testing.T, p printer, v View) {
	t.Helper()
	way := Sensors[0].Ways[1]
	results := []sensor.Result{{Sensor: Sensors[0], Got: &way, Refused: []sensor.Refusal{{Way: Sensors[0].Ways[0], Reason: "EPERM"}}}, {Sensor: Sensors[1]}}
	if err := p.start(results, "a file", []string{"A note."}); err != nil {
		t.Fatal(err)
	}
	if err := p.interval(v.of(shown())); err != nil {
		t.Fatal(err)
	}
	sampled := shown()
	sampled.Sample, sampled.Spending = 16, &sensor.Spending{Percent: 2.5, Change: "a change"}
	sampled.Rows[0].WriteSizes = []uint64{8, 4, 2, 0, 0, 0, 1, 1}
	v.ByDisk = true
	if err := p.interval(v.of(sampled)); err != nil {
		t.Fatal(err)
	}
	v.ByDisk = false
	all := whole{}
	all.add(shown())
	all.add(shown())
	sum, hidden := v.of(all.sum())
	if err := p.summary(sum, hidden, event.Summary{Received: 3, Lost: 1}); err != nil {
		t.Fatal(err)
	}
}

func TestOutput(t *testing.T) {
	var people, programs bytes.Buffer
	run(t, text{&people}, View{Top: 2})
	run(t, jsonLines{json.NewEncoder(&programs)}, View{})
	for path, got := range map[string]string{"testdata/run.txt": people.String(), "testdata/run.json": programs.String()} {
		golden.Require(t, path, got)
	}
}

func TestViewShowsWhatWasAskedFor(t *testing.T) {
	for _, test := range []struct {
		name        string
		view        View
		rows, disks int
	}{
		{"all", View{}, 3, 1},
		{"top", View{Top: 1}, 1, 1},
		{"process", View{PID: 100}, 2, 1},
		{"another process", View{PID: 101}, 0, 1},
		{"bandwidth", View{Bandwidth: 1 << 19}, 2, 1},
		{"requests", View{Rate: 5}, 1, 1},
		{"busy disk", View{Util: 50}, 3, 1},
		{"idle disk", View{Util: 51}, 0, 0},
		{"another device", View{Device: "sdy"}, 0, 0},
		{"device", View{Device: "sdx"}, 3, 1},
		{"no disks", View{NoDisks: true}, 3, 0},
		{"by disk", View{ByDisk: true}, 2, 1},
	} {
		i, hidden := test.view.of(shown())
		all := 3
		if test.view.ByDisk {
			all = 2
		}
		if len(i.Rows) != test.rows || len(i.Disks) != test.disks || hidden != all-test.rows || i.Bytes != shown().Bytes {
			t.Errorf("%s: %d rows and %d hidden, %d disks: %+v", test.name, len(i.Rows), hidden, len(i.Disks), i)
		}
	}
	if err := (View{Device: "no/such"}).Check(); err == nil || !strings.Contains(err.Error(), "no/such") {
		t.Errorf("a device that is not there: %v", err)
	}
}

func TestDiskRow(t *testing.T) {
	stat := diskstat{requests: [2]uint64{4, 8}, bytes: [2]uint64{4096, 8192}, waitMs: [2]uint64{8, 40}, busyMs: 500}
	sample := disk{Requests: [2]uint64{4, 8}, WaitNs: [2]uint64{4e6, 12e6}, DeviceNs: [2]uint64{6e6, 6e6}, Unstamped: [2]uint64{0, 2}}
	want := Disk{Name: "sdx", ReadRate: 2, WriteRate: 4, ReadBytes: 2048, WriteBytes: 4096, Wait: 1.6, ReadWait: 1, WriteWait: 2, Device: 1, Util: 25}
	if got := diskRow("sdx", stat, sample, 2*time.Second); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	want.Wait, want.ReadWait, want.WriteWait, want.Device = 4, 2, 5, 0
	if got := diskRow("sdx", stat, disk{}, 2*time.Second); got != want {
		t.Errorf("without a sample: got %+v, want %+v", got, want)
	}
}
