package io

import (
	"encoding/json"
	"fmt"
	stdio "io"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/shunt-lb/shunt/internal/diag/line"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

// printer writes the findings of a run.
type printer interface {
	start(results []sensor.Result, btf string, notes []string) error
	interval(i Interval, hidden int) error
	summary(i Interval, hidden int, names event.Summary) error
}

// text writes for people.
type text struct{ out stdio.Writer }

func (p text) start(results []sensor.Result, btf string, notes []string) error {
	for _, r := range results {
		fmt.Fprintln(p.out, r)
	}
	for _, note := range notes {
		fmt.Fprintln(p.out, note)
	}
	_, err := fmt.Fprintf(p.out, "types: %s\n", btf)
	return err
}

func (p text) interval(i Interval, hidden int) error {
	fmt.Fprintf(p.out, "\n%s\n", i.Time.Format("2006-01-02 15:04:05"))
	return p.tables(i, hidden)
}

func (p text) summary(i Interval, hidden int, names event.Summary) error {
	fmt.Fprintf(p.out, "\nSummary of %.1f s\n", i.Seconds)
	if err := p.tables(i, hidden); err != nil {
		return err
	}
	_, err := fmt.Fprintf(p.out, "names of files: %d received, %d lost, %d broken; IOs and runs of sensors: %d missed\n",
		names.Received, names.Lost, names.Broken, i.Missed())
	return err
}

func (p text) tables(i Interval, hidden int) error {
	w := tabwriter.NewWriter(p.out, 0, 0, 2, ' ', 0)
	if len(i.Disks) > 0 {
		fmt.Fprintln(w, "DEVICE\tR_IOPS\tW_IOPS\tR_BPS\tW_BPS\tWAIT ms\tR_WAIT\tW_WAIT\tDEVICE ms\tUTIL%")
		for _, d := range i.Disks {
			fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%s\t%s\t%.2f\t%.2f\t%.2f\t%.2f\t%.1f\n", d.Name, d.ReadRate, d.WriteRate,
				rate(d.ReadBytes), rate(d.WriteBytes), d.Wait, d.ReadWait, d.WriteWait, d.Device, d.Util)
		}
		fmt.Fprintln(w)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	bySize := slices.ContainsFunc(i.Rows, func(r Row) bool { return len(r.WriteSizes) > 0 })
	if len(i.Rows) > 0 {
		titles := "COMM\tPID\tCNT_RD\tBW_RD\tCNT_WR\tBW_WR\tINODE\tDEVICE\tFILEPATH"
		if bySize {
			titles = sizeTitles
		}
		fmt.Fprintln(w, titles)
	}
	for _, r := range i.Rows {
		comm, path := r.Comm, event.Printable(r.Path)
		if r.Unattributed {
			comm = "[" + comm + "]"
		}
		if r.Container != "" {
			path += " [containerId:" + r.Container[:12] + "]"
		}
		fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%d\t%s\t", event.Printable(comm), r.PID, r.Reads, rate(float64(r.ReadBytes)/i.Seconds), r.Writes, rate(float64(r.WriteBytes)/i.Seconds))
		if bySize {
			fmt.Fprintf(w, "%s\t%s\n", r.Device, sizeShares(r))
			continue
		}
		fmt.Fprintf(w, "%d\t%s\t%s\n", r.Inode, r.Device, path)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if hidden > 0 {
		fmt.Fprintf(p.out, "%d more rows are not shown\n", hidden)
	}
	if i.MissedBytes > 0 {
		fmt.Fprintf(p.out, "%d bytes are in no row, because there were more than %d rows\n", i.MissedBytes, rowsMax)
	}
	for _, sensor := range slices.Sorted(maps.Keys(i.NotRun)) {
		fmt.Fprintf(p.out, "%s: %d were not seen, because the sensor was interrupted on its CPU\n", sensor, i.NotRun[sensor])
	}
	if unseen := i.EndsUnseen(); unseen != "" {
		fmt.Fprintf(p.out, "%s: %s, by the kernel's account of the disks; the times are of the others\n", disks, unseen)
	}
	if i.Sample > 1 {
		fmt.Fprintf(p.out, "rows are estimates from one IO of %d: in 19 cases of 20 the error of a row of n requests is at most %.0f %% / √n\n", i.Sample, 196*math.Sqrt(float64(i.Sample-1)))
	}
	if i.Spending != nil {
		if err := line.Spending(p.out, *i.Spending); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(p.out, "unattributed %.1f %% of %s\n", i.UnattributedPercent(), Size(float64(i.Bytes)))
	return err
}

// sizeTitles are the titles of rows with the shares of writes by size.
const sizeTitles = "COMM\tPID\tCNT_RD\tBW_RD\tCNT_WR\tBW_WR\tDEVICE\tW<=4K\t<=16K\t<=32K\t<=64K\t<=128K\t<=256K\t<=512K\tLARGER"

// sizeShares returns the shares in percent of the row's writes.
func sizeShares(r Row) string {
	shares := make([]string, ioIoConstantIO_SIZES_COUNT)
	for n := range shares {
		shares[n] = "0"
		if n < len(r.WriteSizes) && r.WriteSizes[n] > 0 {
			shares[n] = fmt.Sprintf("%.1f%%", 100*float64(r.WriteSizes[n])/float64(r.Writes))
		}
	}
	return strings.Join(shares, "\t")
}

func rate(bytes float64) string {
	if bytes == 0 {
		return "0"
	}
	return Size(bytes) + "/s"
}

// Size returns a size in binary units, like tools that print KB/s for disks.
func Size(bytes float64) string {
	units := []string{"B", "KB", "MB", "GB", "TB"}
	at := 0
	for ; bytes >= 1024 && at < len(units)-1; at++ {
		bytes /= 1024
	}
	return fmt.Sprintf("%.1f%s", bytes, units[at])
}

// jsonLines writes for programs: one object a line, each with its type.
type jsonLines struct{ out *json.Encoder }

type startLine struct {
	line.Start
	Notes []string `json:"notes"`
}

type intervalLine struct {
	Type string `json:"type"` // interval or summary
	Interval
	Percent float64        `json:"unattributed_percent"`
	Hidden  int            `json:"rows_not_shown"`
	Names   *event.Summary `json:"names,omitempty"` // of the summary: counts of the stream of names
}

func (p jsonLines) start(results []sensor.Result, btf string, notes []string) error {
	return p.out.Encode(startLine{line.NewStart(results, btf), append([]string{}, notes...)})
}

func (p jsonLines) interval(i Interval, hidden int) error {
	return p.out.Encode(intervalLine{"interval", i, i.UnattributedPercent(), hidden, nil})
}

func (p jsonLines) summary(i Interval, hidden int, names event.Summary) error {
	return p.out.Encode(intervalLine{"summary", i, i.UnattributedPercent(), hidden, &names})
}
