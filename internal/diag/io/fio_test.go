package io

import (
	"encoding/json"
	"os/exec"
	"testing"
)

// TestAgainstFio compares the rows of a file with fio's own figures of its reads and writes, in each way in which a
// program may hand IO to the kernel: direct IO within 5 ‰, in bytes and requests; IO through the page cache, in bytes,
// within 20 ‰.
func TestAgainstFio(t *testing.T) {
	if _, err := exec.LookPath("fio"); err != nil {
		t.Skip("needs fio")
	}
	for _, test := range []struct {
		name   string
		direct bool
		args   []string
	}{
		{"direct reads, pread", true, []string{"--ioengine=psync", "--direct=1", "--rw=randread"}},
		{"direct writes, pwrite", true, []string{"--ioengine=psync", "--direct=1", "--rw=randwrite"}},
		{"direct reads, io_uring", true, []string{"--ioengine=io_uring", "--iodepth=8", "--direct=1", "--rw=randread"}},
		{"direct writes, io_uring", true, []string{"--ioengine=io_uring", "--iodepth=8", "--direct=1", "--rw=randwrite"}},
		{"direct, both, two processes", true, []string{"--ioengine=psync", "--direct=1", "--rw=randrw", "--numjobs=2"}},
		{"writes to the page cache", false, []string{"--ioengine=psync", "--rw=write", "--end_fsync=1"}},
		{"writes to the page cache, io_uring", false, []string{"--ioengine=io_uring", "--rw=write", "--end_fsync=1"}},
		{"reads through the page cache", false, []string{"--ioengine=psync", "--rw=read", "--invalidate=1"}},
		{"mapped writes", false, []string{"--ioengine=mmap", "--rw=write", "--end_fsync=1"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			path, inode := onDisk(t)
			c := watch(t, inode)
			args := append(test.args, "--name=fio", "--filename="+path, "--size=8m", "--bs=16k", "--group_reporting", "--output-format=json")
			out, err := exec.Command("fio", args...).Output()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			var says struct {
				Jobs []struct {
					Read, Write struct {
						Bytes    uint64 `json:"io_bytes"`
						Requests uint64 `json:"total_ios"`
					}
				}
			}
			if err := json.Unmarshal(out, &says); err != nil || len(says.Jobs) != 1 {
				t.Fatalf("%v\n%s", err, out)
			}
			flush(t, path)
			i := interval(t, c)
			sum := Row{}
			for _, r := range i.Rows {
				if r.Comm != "fio" || r.Path != path || r.Unattributed {
					t.Errorf("a row that is not fio's: %+v", r)
				}
				sum = plus(sum, r)
			}
			read, write := says.Jobs[0].Read, says.Jobs[0].Write
			t.Logf("fio: %+v and %+v; rows: %+v", read, write, sum)
			thousandths := uint64(20)
			if test.direct {
				thousandths = 5
				near(t, "reads", sum.Reads, read.Requests, thousandths)
				near(t, "writes", sum.Writes, write.Requests, thousandths)
			}
			near(t, "bytes written", sum.WriteBytes, write.Bytes, thousandths)
			if test.name != "mapped writes" { // a page is read before it is written to
				near(t, "bytes read", sum.ReadBytes, read.Bytes, thousandths)
			}
			if read.Bytes+write.Bytes < fileBytes {
				t.Errorf("fio did too little: %+v, %+v", read, write)
			}
		})
	}
}
