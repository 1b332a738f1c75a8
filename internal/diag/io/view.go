package io

import (
	"cmp"
	"fmt"
	"os"
	"slices"
)

// View selects the rows of an interval that are shown. The zero value shows all.
type View struct {
	Device    string  // this disk, with its partitions, or this partition; "": all
	PID       uint32  // this process; 0: all
	Top       int     // number of rows; 0: all
	Util      float64 // only disks that are at least this busy, in percent, and their IO
	Bandwidth float64 // only rows with at least this number of bytes per second
	Rate      float64 // only rows with at least this number of requests per second
	ByDisk    bool    // rows by process and disk, without files
	NoDisks   bool
}

// Check returns an error for a view that cannot be shown.
func (v View) Check() error {
	if v.Device == "" {
		return nil
	}
	if _, err := os.Stat("/sys/class/block/" + v.Device); err != nil {
		return fmt.Errorf("there is no block device %q; `lsblk` lists them", v.Device)
	}
	return nil
}

// of returns the part of the interval that is shown, and the number of rows that are not. Bytes and UnattributedBytes
// stay those of all IO.
func (v View) of(i Interval) (Interval, int) {
	rows := i.Rows
	if v.ByDisk {
		rows = byDisk(rows)
	}
	busy := map[string]bool{}
	shown := []Disk{}
	for _, d := range i.Disks {
		busy[d.Name] = d.Util >= v.Util
		if busy[d.Name] && v.hasDisk(d.Name) && !v.NoDisks {
			shown = append(shown, d)
		}
	}
	i.Disks, i.Rows = shown, []Row{}
	for _, r := range rows {
		isBusy := v.Util == 0 || busy[r.Device] || slices.ContainsFunc(i.Disks, func(d Disk) bool { return isPart(d.Name, r.Device) })
		bytes, requests := float64(r.ReadBytes+r.WriteBytes), float64(r.Reads+r.Writes)
		if isBusy && v.hasDisk(r.Device) && (v.PID == 0 || v.PID == r.PID) && bytes >= v.Bandwidth*i.Seconds && requests >= v.Rate*i.Seconds &&
			(v.Top == 0 || len(i.Rows) < v.Top) {
			i.Rows = append(i.Rows, r)
		}
	}
	return i, len(rows) - len(i.Rows)
}

func (v View) hasDisk(name string) bool {
	return v.Device == "" || name == v.Device || isPart(v.Device, name) || isPart(name, v.Device)
}

// isPart reports whether the second device is a partition of the first.
func isPart(disk, part string) bool {
	_, err := os.Stat("/sys/block/" + disk + "/" + part + "/partition")
	return err == nil
}

// byDisk adds up the rows of each process and disk.
func byDisk(rows []Row) []Row {
	type key struct {
		pid    uint32
		device string
		un     bool
	}
	sums := map[key]Row{}
	for _, r := range rows {
		k := key{r.PID, r.Device, r.Unattributed}
		sum, known := sums[k]
		if !known {
			sum = r
			sum.Inode, sum.Path = 0, "-"
		} else {
			sum = plus(sum, r)
		}
		sums[k] = sum
	}
	return sorted(sums)
}

func plus(a, b Row) Row {
	a.Reads += b.Reads
	a.ReadBytes += b.ReadBytes
	a.Writes += b.Writes
	a.WriteBytes += b.WriteBytes
	if len(a.WriteSizes) < len(b.WriteSizes) {
		a.WriteSizes, b.WriteSizes = b.WriteSizes, a.WriteSizes
	}
	a.WriteSizes = slices.Clone(a.WriteSizes) // the other row may still be shown
	for n := range b.WriteSizes {
		a.WriteSizes[n] += b.WriteSizes[n]
	}
	return a
}

func sorted[K comparable](rows map[K]Row) []Row {
	list := make([]Row, 0, len(rows))
	for _, r := range rows {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b Row) int {
		return cmp.Or(cmp.Compare(b.ReadBytes+b.WriteBytes, a.ReadBytes+a.WriteBytes), cmp.Compare(a.PID, b.PID),
			cmp.Compare(a.Inode, b.Inode), cmp.Compare(a.Device, b.Device), cmp.Compare(a.Path, b.Path))
	})
	return list
}

// whole adds all intervals up, without disks.
type whole struct {
	interval Interval
	rows     map[wholeKey]Row
}

type wholeKey struct {
	pid          uint32
	comm, device string
	inode        uint64
	unattributed bool
}

func (w *whole) add(i Interval) {
	if w.rows == nil {
		w.rows, w.interval.NotRun = map[wholeKey]Row{}, map[string]uint64{}
	}
	w.interval.Time = i.Time
	w.interval.Seconds += i.Seconds
	w.interval.Bytes += i.Bytes
	w.interval.UnattributedBytes += i.UnattributedBytes
	w.interval.MissedBytes += i.MissedBytes
	w.interval.MissedCount += i.MissedCount
	w.interval.ReadsUnseen += i.ReadsUnseen
	w.interval.WritesUnseen += i.WritesUnseen
	w.interval.Sample = max(w.interval.Sample, i.Sample)
	for sensor, n := range i.NotRun {
		w.interval.NotRun[sensor] += n
	}
	for _, r := range i.Rows {
		k := wholeKey{r.PID, r.Comm, r.Device, r.Inode, r.Unattributed}
		if before, known := w.rows[k]; known {
			path := r.Path
			r = plus(before, r)
			if path != "-" {
				r.Path = path
			}
		}
		w.rows[k] = r
	}
}

func (w *whole) sum() Interval {
	i := w.interval
	i.Disks, i.Rows = []Disk{}, sorted(w.rows)
	return i
}
