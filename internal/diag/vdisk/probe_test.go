package vdisk

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/sensor"
	"github.com/shunt-lb/shunt/test/golden"
)

// atProbes adds passes of probes to one write from 1000 on: in qemu's coroutine, in the thread's system call, and of none.
func atProbes(s *story) {
	s.at(1030, 1, vdiskVdiskKindVDISK_POINT, vdiskVdiskEvent{Id: 0, Stack: 1<<41 - 500})
	s.at(1040, 1, vdiskVdiskKindVDISK_POINT, vdiskVdiskEvent{Id: 0, Stack: 1<<41 - 500})
	s.at(1045, 1, vdiskVdiskKindVDISK_POINT, vdiskVdiskEvent{Id: 1, Stack: 1<<41 - 600})
	s.at(1170, 2, vdiskVdiskKindVDISK_POINT, vdiskVdiskEvent{Id: 2})
	s.at(1180, 5, vdiskVdiskKindVDISK_POINT, vdiskVdiskEvent{Id: 2})
	s.at(1700, 1, vdiskVdiskKindVDISK_POINT, vdiskVdiskEvent{Id: 0, Stack: 1<<41 - 500})
}

// TestParts divides the layers of one write at its probes; a pass that belongs to no request is counted.
func TestParts(t *testing.T) {
	s := &story{}
	oneWrite(s, 1000, 0xa0, 0, 1<<41)
	atProbes(s)
	r := Of(&Recording{Head: Head{Probes: []string{"qemu:a", "qemu:b", "kernel:c"}}, Events: s.events, Tail: aTail()})
	one := r.Requests[0]
	want := Parts{"qemu": {"": 30, "qemu:a": 15, "qemu:b": 55}, "vfs": {"": 20, "kernel:c": 50}}
	if !maps.Equal(one.Layers, timesOfOneWrite) || len(one.Parts) != len(want) || !maps.Equal(one.Parts["qemu"], want["qemu"]) || !maps.Equal(one.Parts["vfs"], want["vfs"]) {
		t.Errorf("%+v, want %v", one, want)
	}
	passes := []Passes{{"qemu:a", 3, 1}, {"qemu:b", 1, 0}, {"kernel:c", 2, 1}}
	if !slices.Equal(r.Sum.Passes, passes) || len(r.Sum.Parts) != 5 || r.Sum.Parts[2].From != "qemu:b" || r.Sum.Parts[2].Share != 55 {
		t.Errorf("%+v", r.Sum)
	}
	var out bytes.Buffer
	if err := r.Print(&out, 1); err != nil {
		t.Fatal(err)
	}
	if err := r.Chain(&out, 1); err != nil {
		t.Fatal(err)
	}
	var programs bytes.Buffer
	if err := r.PrintJSON(&programs); err != nil {
		t.Fatal(err)
	}
	golden.Require(t, "testdata/parts.txt", out.String())
	golden.Require(t, "testdata/parts.json", programs.String())
}

// TestPartsAddUp has probes at random times: the parts of a layer have its time.
func TestPartsAddUp(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for range 1000 {
		s := &story{}
		oneWrite(s, 1000, 0xa0, 0, 1<<41)
		for range random.IntN(6) {
			e := vdiskVdiskEvent{Id: random.Uint64N(4)} // one more than there are
			tid := uint32(2)
			if random.IntN(2) == 0 {
				e.Stack, tid = 1<<41, 1
			}
			s.at(990+random.Uint64N(650), tid, vdiskVdiskKindVDISK_POINT, e)
		}
		one := Of(&Recording{Head: Head{Probes: []string{"a", "b", "c"}}, Events: s.events, Tail: aTail()}).Requests[0]
		checkSum(t, one)
		for layer, parts := range one.Parts {
			sum := uint64(0)
			for _, ns := range parts {
				sum += ns
			}
			if sum != one.Layers[layer] {
				t.Fatalf("the parts of %s have %d ns: %+v", layer, sum, one)
			}
		}
	}
}

// TestProbeFindsTheSlowPart has qemu's throttle hold writes back, with probes before and after it: the time is between them.
func TestProbeFindsTheSlowPart(t *testing.T) {
	need(t, "qemu-img", "qemu-io")
	path, _ := image(t, t.TempDir())
	q := openDrive(t, "--object", "throttle-group,id=slow,x-iops-write=2", "-n", "-i", "threads", "--image-opts",
		"driver=throttle,throttle-group=slow,file.driver=qcow2,file.file.driver=file,file.file.filename="+path)
	q.do("aio_write 16M 1M", "aio_flush", "flush")
	before, after := Probe{ProbeQemu, "throttle_group_co_io_limits_intercept"}, Probe{ProbeQemu, "bdrv_co_pwritev"}
	r := q.record(Options{Probes: []Probe{after, before}}, func() {
		text := ""
		for i := range 4 {
			text += q.do(fmt.Sprintf("aio_write %dk 4k", 16384+i*64))
			for strings.Count(text, "wrote ") <= i {
				text += q.do("sleep 10")
			}
		}
	})
	var out bytes.Buffer
	if err := r.Print(&out, 4); err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + out.String())
	shares := map[string]float64{}
	for _, p := range r.Sum.Parts {
		if p.Layer == InQemu.String() {
			shares[p.From] = p.Share
			if p.Requests != 4 {
				t.Errorf("4 writes pass each probe: %+v", p)
			}
		}
	}
	if len(shares) != 3 || shares[before.String()] < 90 {
		t.Errorf("the throttle has the time: %+v", r.Sum.Parts)
	}
	for _, p := range r.Sum.Passes {
		if p.Count < 4 || p.Stray != 0 {
			t.Errorf("%+v", p)
		}
	}
}

// TestProbesThatAreRefused has wrong names, and finds the near ones.
func TestProbesThatAreRefused(t *testing.T) {
	for _, text := range []string{"", "main", "qemu:", "user:main", "kernel:a b", "qemu:a:b"} {
		if p, err := ParseProbe(text); err == nil {
			t.Errorf("%q is %v", text, p)
		}
	}
	need(t, "qemu-img", "qemu-io")
	path, _ := image(t, t.TempDir())
	q := openDrive(t, "-n", "-f", "qcow2", path)
	b, err := sensor.FindBTF("")
	if err != nil {
		t.Fatal(err)
	}
	many := make([]Probe, probesMax+1)
	for _, test := range []struct {
		probes []Probe
		guest  bool
		want   []string
	}{
		{[]Probe{{ProbeQemu, "bdrv_co_pwritv"}}, false, []string{"qemu:bdrv_co_pwritv", "no function", "bdrv_co_pwritev"}},
		{[]Probe{{ProbeQemu, "throttle_group_co_io"}}, false, []string{"throttle_group_co_io_limits_intercept"}},
		{[]Probe{{ProbeQemu, "zzzzqqqqzzzz"}}, false, []string{"no symbol is like it"}},
		{[]Probe{{ProbeKernel, "submit_bioo"}}, false, []string{"the kernel has no function submit_bioo; like it: submit_bio"}},
		{[]Probe{{ProbeKernel, "__pfx_submit_bio"}}, false, []string{"no function __pfx_submit_bio"}},
		{[]Probe{{ProbeQemu, "bdrv_co_pwritev"}, {ProbeQemu, "bdrv_co_pwritev"}}, false, []string{"twice"}},
		{[]Probe{{ProbeQemu, "bdrv_co_pwritev"}}, true, []string{"does not run inside the guest"}},
		{many, false, []string{"16 are possible"}},
	} {
		o := Options{BTF: b, Guest: test.guest, Path: filepath.Join(t.TempDir(), "recording"), Limit: 1 << 20, Probes: test.probes}
		if !test.guest {
			o.PID = q.cmd.Process.Pid
		}
		err := Record(t.Context(), o, io.Discard)
		for _, want := range test.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v: %v, want %q", test.probes, err, want)
			}
		}
		if _, err := os.Stat(o.Path); err == nil {
			t.Errorf("%v: there is a recording", test.probes)
		}
	}
}

// TestProbeInTheKernel attaches where the kernel has kprobes; elsewhere the refusal names the lack, and nothing is
// recorded.
func TestProbeInTheKernel(t *testing.T) {
	need(t, "qemu-img", "qemu-io")
	d := newDisk(t)
	path, _ := image(t, d.folder)
	q := openDrive(t, "-n", "-f", "qcow2", "-i", "threads", path)
	b, err := sensor.FindBTF("")
	if err != nil {
		t.Fatal(err)
	}
	probe := Probe{ProbeKernel, "ext4_file_write_iter"}
	o := Options{BTF: b, PID: q.cmd.Process.Pid, Path: filepath.Join(t.TempDir(), "recording"), Limit: 1 << 20, Probes: []Probe{probe}, Duration: 1}
	if err := Record(t.Context(), o, io.Discard); err != nil {
		if !strings.Contains(err.Error(), "attach the probe kernel:ext4_file_write_iter: the kernel refuses: ") || !strings.Contains(err.Error(), "Record without it") {
			t.Errorf("%v", err)
		}
		if _, err := os.Stat(o.Path); err == nil {
			t.Error("there is a recording")
		}
		return
	}
	r := q.record(Options{Probes: []Probe{probe}}, func() { q.do("aio_write 16M 64k", "aio_flush") })
	parts := r.Requests[0].Parts[InSystem.String()]
	if _, is := parts[probe.String()]; !is || r.Sum.Passes[0].Count == 0 {
		t.Errorf("%+v: %+v", r.Requests, r.Sum)
	}
}
