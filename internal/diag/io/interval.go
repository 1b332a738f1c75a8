package io

import (
	"fmt"
	"time"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

// Interval has the IO between two moments.
type Interval struct {
	Time    time.Time `json:"time"` // its end
	Seconds float64   `json:"seconds"`
	Disks   []Disk    `json:"disks"`
	Rows    []Row     `json:"rows"`
	// Bytes counts all reads and writes that entered the block layer, in rows or not.
	Bytes uint64 `json:"bytes"`
	// UnattributedBytes is the part of Bytes whose process is not known, and MissedBytes the part of that which
	// is in no row, because the map of rows was full.
	UnattributedBytes uint64 `json:"unattributed_bytes"`
	MissedBytes       uint64 `json:"missed_bytes"`
	MissedCount       uint64 `json:"missed_count"`
	// NotRun is the number of times that the kernel did not run a sensor, by its name, because an interrupt came while
	// it ran on the same CPU. The IO of these runs is not known.
	NotRun map[string]uint64 `json:"not_run"`
	// ReadsUnseen and WritesUnseen are the numbers of reads and writes of disks that ended without the sensor, for this or another reason,
	// from the kernel's account of the disks. It takes all operations that change a disk for writes, but for discards. They are 0 as soon as
	// not every IO is watched.
	ReadsUnseen  uint64 `json:"reads_unseen"`
	WritesUnseen uint64 `json:"writes_unseen"`
	// Sample: at the end, one IO in this number was watched, and counted for all of them.
	Sample uint32 `json:"sample"`
	*sensor.Spending
}

// Missed returns the number of sensors' runs, and of IOs without a row, that the interval lacks.
func (i Interval) Missed() (n uint64) {
	for _, one := range i.NotRun {
		n += one
	}
	// A request that ended while the sensor ran is in both counts.
	unseen := i.ReadsUnseen + i.WritesUnseen
	return n + i.MissedCount + unseen - min(unseen, i.NotRun[disks])
}

// EndsUnseen is a text with the number of disk requests that ended unseen; "": none.
func (i Interval) EndsUnseen() string {
	if i.ReadsUnseen+i.WritesUnseen == 0 {
		return ""
	}
	return fmt.Sprintf("%d reads and %d writes ended unseen", i.ReadsUnseen, i.WritesUnseen)
}

// UnattributedPercent returns the part of the bytes whose process is not known, in percent.
func (i Interval) UnattributedPercent() float64 {
	if i.Bytes == 0 {
		return 0
	}
	return 100 * float64(i.UnattributedBytes) / float64(i.Bytes)
}

// Row is the IO of one process with one file. It is counted where it enters the block layer.
type Row struct {
	Comm       string `json:"comm"` // of the process's first thread
	PID        uint32 `json:"pid"`  // of the process
	Reads      uint64 `json:"cnt_rd"`
	ReadBytes  uint64 `json:"bytes_rd"`
	Writes     uint64 `json:"cnt_wr"`
	WriteBytes uint64 `json:"bytes_wr"`
	// WriteSizes counts the writes of at most 4, 16, 32, 64, 128, 256 and 512 KiB, and larger ones; none: they were not counted.
	WriteSizes []uint64 `json:"wr_sizes,omitempty"`
	Inode      uint64   `json:"inode"`  // 0: no file
	Device     string   `json:"device"` // of the file system, or the disk where there is no file
	Path       string   `json:"filepath"`
	Container  string   `json:"container_id,omitempty"`
	// Unattributed: the process only carried the IO out, and it is not known for which other one.
	Unattributed bool `json:"unattributed,omitempty"`
}

// about has a process's facts other than its IO.
type about struct {
	comm        string
	cgroup      uint64
	mntns       uint32
	lastJiffies uint64    // of the kernel, at its last IO under this name
	last        time.Time // the interval of lastJiffies
}

// account turns counts into rows.
func (c *Collector) account(counts map[rowKey]counted, now time.Time, took time.Duration) (Interval, error) {
	i := Interval{Time: now, Seconds: took.Seconds()}
	for key, n := range counts {
		p := process{key.Tgid, key.StartNs, key.IsKernel != 0}
		c.ledger.meet(p, about{comm: event.Text(n.Comm[:]), cgroup: n.CgroupId, mntns: n.Mntns, lastJiffies: n.LastJiffies}, now)
	}
	rows := map[chargeKey]Row{}
	for key, n := range c.ledger.settle(counts, now) {
		rows[key] = c.row(key, n, counts)
		i.Bytes += n.readBytes + n.writeBytes
		if key.unattributed {
			i.UnattributedBytes += n.readBytes + n.writeBytes
		}
	}
	i.Rows = sorted(rows)
	missed, err := c.readMissed()
	if err != nil {
		return Interval{}, err
	}
	i.MissedBytes, i.MissedCount = missed.Bytes-c.missed.Bytes, missed.Count-c.missed.Count
	c.missed = missed
	i.Bytes += i.MissedBytes
	i.UnattributedBytes += i.MissedBytes
	if i.NotRun, err = c.readNotRun(); err != nil {
		return Interval{}, err
	}
	i.Disks, err = c.diskRows(took)
	i.ReadsUnseen, i.WritesUnseen, c.endsUnseen = c.endsUnseen[0], c.endsUnseen[1], [2]uint64{}
	c.names.forget()
	return i, err
}

func (c *Collector) row(key chargeKey, n charge, counts map[rowKey]counted) Row {
	known := c.ledger.met[key.process]
	r := Row{Comm: known.comm, PID: key.process.tgid, Reads: n.reads, ReadBytes: n.readBytes, Writes: n.writes, WriteBytes: n.writeBytes,
		Inode: key.file.Inode, Path: c.names.path(key.file, key.process.tgid, known.mntns), Unattributed: key.unattributed}
	if n.sizes != (sizes{}) {
		r.WriteSizes = n.sizes[:]
	}
	device := key.file.Device
	if device == 0 {
		device = counts[rowKey{File: key.file, StartNs: key.process.start, Tgid: key.process.tgid, IsKernel: number(key.process.isKernel)}].Disk
	}
	r.Device = c.names.device(device)
	if !key.process.isKernel {
		r.Container = c.names.container(known.cgroup, key.process.tgid)
	}
	return r
}

func number(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}
