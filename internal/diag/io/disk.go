package io

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Disk is the work of a disk in an interval. Rates are per second; times are the mean of the requests that ended, in
// milliseconds.
type Disk struct {
	Name       string  `json:"device"`
	ReadRate   float64 `json:"r_iops"`
	WriteRate  float64 `json:"w_iops"`
	ReadBytes  float64 `json:"r_bps"`
	WriteBytes float64 `json:"w_bps"`
	Wait       float64 `json:"wait_ms"` // from the request's making to its end
	ReadWait   float64 `json:"r_wait_ms"`
	WriteWait  float64 `json:"w_wait_ms"`
	Device     float64 `json:"device_ms"` // part of Wait in the driver and the device; 0: the kernel takes no stamp
	Util       float64 `json:"util_percent"`
}

// diskRows returns the work of the disks since the last call. The amounts are from the kernel's own account, and
// therefore complete; the times are from the requests that the sensor saw.
func (c *Collector) diskRows(took time.Duration) ([]Disk, error) {
	stats, err := diskstats()
	if err != nil {
		return nil, err
	}
	sums, err := c.diskSums()
	if err != nil {
		return nil, err
	}
	samples := map[string]disk{}
	for key, sum := range sums {
		name := c.names.device(key)
		samples[name] = minus(sum, c.disks[key])
		c.disks[key] = sum
		if u := c.unseen[name]; u != nil && !c.sampled && c.set.Holds(disks) {
			for op, seen := range sum.accounted() {
				if op == 1 && c.writesTwice {
					continue
				}
				c.endsUnseen[op] += u[op].more(stats[name].requests[op], seen)
			}
		}
	}
	rows := []Disk{}
	for name, now := range stats {
		before, known := c.stats[name]
		if !known || took == 0 || now.requests == before.requests || !exists("/sys/block/"+name) {
			continue // idle, or a partition
		}
		rows = append(rows, diskRow(name, now.since(before), samples[name], took))
	}
	c.stats = stats
	slices.SortFunc(rows, func(a, b Disk) int { return cmp.Compare(a.Name, b.Name) })
	return rows, nil
}

// diskSums returns the counts of requests of each disk that the sensor has seen since the start.
func (c *Collector) diskSums() (map[uint32]disk, error) {
	sums := map[uint32]disk{}
	var key uint32
	var each []disk
	entries := c.set.Maps[ioMapShIoDisks].Iterate()
	for entries.Next(&key, &each) {
		sums[key] = total(each)
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read the times of requests: %w", err)
	}
	return sums, nil
}

// accounted are the requests that the kernel's account of the disk has as reads and as writes.
func (d disk) accounted() [2]uint64 { return [2]uint64{d.Requests[0], d.Requests[1] + d.OtherWrites} }

// unseen computes the number of reads or writes of a disk that ended without the sensor, from two counts: the kernel's
// account of the disk since the boot, and the sensor's since the start.
type unseen struct {
	base int64 // lead of the kernel's count at the start
	most int64 // unseen since then
}

// more returns the number of further reads that are unseen now. The kernel's count is read before the sensor's, so
// reads that end in between make the result too small, until both are read at a moment without an end.
func (u *unseen) more(kernel, sensor uint64) uint64 {
	now := int64(kernel) - int64(sensor) - u.base
	more := max(now-u.most, 0)
	u.most += more
	return uint64(more)
}

// compareEnds begins to compare the requests of the present disks. sums were read before their account.
func (c *Collector) compareEnds(sums map[uint32]disk) {
	c.unseen = map[string]*[2]unseen{}
	for name, s := range c.stats {
		c.unseen[name] = &[2]unseen{{base: int64(s.requests[0])}, {base: int64(s.requests[1])}}
	}
	for key, sum := range sums {
		if u := c.unseen[c.names.device(key)]; u != nil {
			for op, seen := range sum.accounted() {
				u[op].base -= int64(seen)
			}
		}
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func total(each []disk) (sum disk) {
	for _, d := range each {
		for op := range 2 {
			sum.Requests[op] += d.Requests[op]
			sum.Bytes[op] += d.Bytes[op]
			sum.WaitNs[op] += d.WaitNs[op]
			sum.DeviceNs[op] += d.DeviceNs[op]
			sum.Unstamped[op] += d.Unstamped[op]
		}
		sum.OtherWrites += d.OtherWrites
	}
	return sum
}

func minus(a, b disk) disk {
	for op := range 2 {
		a.Requests[op] -= b.Requests[op]
		a.Bytes[op] -= b.Bytes[op]
		a.WaitNs[op] -= b.WaitNs[op]
		a.DeviceNs[op] -= b.DeviceNs[op]
		a.Unstamped[op] -= b.Unstamped[op]
	}
	a.OtherWrites -= b.OtherWrites
	return a
}

// diskRow computes rates and means. Without a sample the waits are the kernel's, in whole milliseconds a request.
func diskRow(name string, d diskstat, sample disk, took time.Duration) Disk {
	seconds := took.Seconds()
	mean := func(ns, requests uint64) float64 {
		if requests == 0 {
			return 0
		}
		return float64(ns) / float64(requests) / 1e6
	}
	row := Disk{
		Name:     name,
		ReadRate: float64(d.requests[0]) / seconds, WriteRate: float64(d.requests[1]) / seconds,
		ReadBytes: float64(d.bytes[0]) / seconds, WriteBytes: float64(d.bytes[1]) / seconds,
		Util: min(100, float64(d.busyMs)/seconds/10),
	}
	timed := [2]uint64{sample.Requests[0] - sample.Unstamped[0], sample.Requests[1] - sample.Unstamped[1]}
	if timed == [2]uint64{} {
		timed = d.requests
		sample = disk{WaitNs: [2]uint64{d.waitMs[0] * 1e6, d.waitMs[1] * 1e6}}
	}
	row.Wait = mean(sample.WaitNs[0]+sample.WaitNs[1], timed[0]+timed[1])
	row.ReadWait, row.WriteWait = mean(sample.WaitNs[0], timed[0]), mean(sample.WaitNs[1], timed[1])
	row.Device = mean(sample.DeviceNs[0]+sample.DeviceNs[1], sample.Requests[0]+sample.Requests[1])
	return row
}

// diskstat is the work of a disk since the boot. [0]: reads; [1]: writes.
type diskstat struct {
	requests, bytes, waitMs [2]uint64
	busyMs                  uint64 // time with requests
}

// since returns the difference; another disk with the same name begins at 0.
func (d diskstat) since(before diskstat) diskstat {
	if d.requests[0] < before.requests[0] || d.requests[1] < before.requests[1] {
		return d
	}
	for op := range 2 {
		d.requests[op] -= before.requests[op]
		d.bytes[op] -= before.bytes[op]
		d.waitMs[op] -= min(d.waitMs[op], before.waitMs[op])
	}
	d.busyMs -= min(d.busyMs, before.busyMs)
	return d
}

// diskstats reads /proc/diskstats (Documentation/admin-guide/iostats.rst); its sectors have 512 bytes.
func diskstats() (map[string]diskstat, error) {
	text, err := os.ReadFile("/proc/diskstats")
	if err != nil {
		return nil, fmt.Errorf("read the counters of the disks: %w", err)
	}
	stats := map[string]diskstat{}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) < 13 {
			continue
		}
		var n [10]uint64
		for i := range n {
			if n[i], err = strconv.ParseUint(fields[3+i], 10, 64); err != nil {
				return nil, fmt.Errorf("read /proc/diskstats: %w", err)
			}
		}
		stats[fields[2]] = diskstat{[2]uint64{n[0], n[4]}, [2]uint64{n[2] * 512, n[6] * 512}, [2]uint64{n[3], n[7]}, n[9]}
	}
	return stats, nil
}
