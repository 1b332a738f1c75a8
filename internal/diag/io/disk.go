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

// Disk is what a disk did in an interval. Rates are per second; times are the mean of the requests that ended, in
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
	Device     float64 `json:"device_ms"` // of that, in the driver and the device; 0: the kernel takes no stamp
	Util       float64 `json:"util_percent"`
}

// diskRows is what the disks did since the last call, which was so long ago.
func (c *Collector) diskRows(took time.Duration) ([]Disk, error) {
	ticks, err := diskTicks()
	if err != nil {
		return nil, err
	}
	rows := []Disk{}
	var key uint32
	var each []disk
	for entries := c.set.Maps[ioMapShIoDisks].Iterate(); ; {
		if !entries.Next(&key, &each) {
			if err := entries.Err(); err != nil {
				return nil, fmt.Errorf("read what the disks did: %w", err)
			}
			break
		}
		sum := total(each)
		name := c.names.device(key)
		if took > 0 {
			rows = append(rows, diskRow(name, minus(sum, c.disks[key]), ticks[name]-min(ticks[name], c.ticks[name]), took))
		}
		c.disks[key] = sum
	}
	c.ticks = ticks
	slices.SortFunc(rows, func(a, b Disk) int { return cmp.Compare(a.Name, b.Name) })
	return rows, nil
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
	return a
}

// diskRow makes rates and means. busy is the time in which the disk had requests, in ms.
func diskRow(name string, d disk, busy uint64, took time.Duration) Disk {
	seconds := took.Seconds()
	mean := func(ns, requests uint64) float64 {
		if requests == 0 {
			return 0
		}
		return float64(ns) / float64(requests) / 1e6
	}
	stamped := [2]uint64{d.Requests[0] - d.Unstamped[0], d.Requests[1] - d.Unstamped[1]}
	return Disk{
		Name:     name,
		ReadRate: float64(d.Requests[0]) / seconds, WriteRate: float64(d.Requests[1]) / seconds,
		ReadBytes: float64(d.Bytes[0]) / seconds, WriteBytes: float64(d.Bytes[1]) / seconds,
		Wait:     mean(d.WaitNs[0]+d.WaitNs[1], stamped[0]+stamped[1]),
		ReadWait: mean(d.WaitNs[0], stamped[0]), WriteWait: mean(d.WaitNs[1], stamped[1]),
		Device: mean(d.DeviceNs[0]+d.DeviceNs[1], d.Requests[0]+d.Requests[1]),
		Util:   min(100, float64(busy)/seconds/10),
	}
}

// diskTicks is the time in which each disk had requests since the boot, in ms: the tenth number of
// /proc/diskstats after the name (Documentation/admin-guide/iostats.rst).
func diskTicks() (map[string]uint64, error) {
	text, err := os.ReadFile("/proc/diskstats")
	if err != nil {
		return nil, fmt.Errorf("read how busy the disks are: %w", err)
	}
	ticks := map[string]uint64{}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > 12 {
			if n, err := strconv.ParseUint(fields[12], 10, 64); err == nil {
				ticks[fields[2]] = n
			}
		}
	}
	return ticks, nil
}
