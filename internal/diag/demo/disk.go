package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// heldFor is the time for which the slow disk holds each write back.
	heldFor = 20 * time.Millisecond
	// slowWrites is the number of writes: a second of them.
	slowWrites = 50
	diskBytes  = 1 << 20
)

// Disk is the slow disk, and the findings of `shunt diag io`.
type Disk struct {
	Device string  `json:"device"`
	Held   float64 `json:"held_ms"`        // each write, by the demo
	Taken  float64 `json:"taken_ms"`       // the mean write, as the process that wrote measured it
	Wait   float64 `json:"told_wait_ms"`   // the mean write
	Writes uint64  `json:"told_writes"`    // by that process
	Bytes  uint64  `json:"told_bytes"`     //
	Comm   string  `json:"told_comm"`      //
	Others int     `json:"others_written"` // other processes that wrote to it
}

func (d *demo) slowDisk(ctx context.Context) error {
	file, err := d.makeSlowFile(ctx, diskBytes, heldFor)
	if err != nil {
		return err
	}
	device, err := d.attachLoop(file)
	if err != nil {
		return err
	}
	w, err := d.hire(ctx, Order{Name: "demo-writer", Disk: device, Count: slowWrites}, nil)
	if err != nil {
		return err
	}
	name := strings.TrimPrefix(device, "/dev/")
	d.Say("  The demo makes a disk, %s, that holds each write back for %v. The process\n  demo-writer, %d, writes %d times %d bytes to it.\n\n", name, heldFor, w.cmd.Process.Pid, slowWrites, writeBytes)
	t, err := d.begin(ctx, nil, "io", "-d", name, "-p", fmt.Sprint(w.cmd.Process.Pid), "--duration", atMost)
	if err != nil {
		return err
	}
	if err := w.work(); err != nil {
		return err
	}
	r, err := w.report(ctx)
	if err != nil {
		return err
	}
	s := &d.facts.Disk
	*s = Disk{Device: name, Held: float64(heldFor) / 1e6, Taken: r.Mean}
	return d.tellDisk(ctx, t, uint32(w.cmd.Process.Pid))
}

// tellDisk reads the tool's findings, and compares.
func (d *demo) tellDisk(ctx context.Context, t tool, pid uint32) error {
	s := &d.facts.Disk
	waits, requests := 0.0, 0.0
	err := t.end(ctx, func(kind string, text []byte) error {
		var line struct {
			Seconds float64
			Disks   []struct {
				Device    string
				WriteRate float64 `json:"w_iops"`
				WriteWait float64 `json:"w_wait_ms"`
			}
			Rows []struct {
				PID    uint32
				Comm   string
				Writes uint64 `json:"cnt_wr"`
				Bytes  uint64 `json:"bytes_wr"`
			}
		}
		if err := json.Unmarshal(text, &line); err != nil {
			return err
		}
		for _, one := range line.Disks {
			waits += one.WriteWait * one.WriteRate * line.Seconds
			requests += one.WriteRate * line.Seconds
		}
		if kind != "summary" {
			return nil
		}
		for _, row := range line.Rows {
			if row.PID != pid {
				s.Others++
				continue
			}
			s.Comm = row.Comm
			s.Writes += row.Writes
			s.Bytes += row.Bytes
		}
		return nil
	})
	if err != nil {
		return err
	}
	if requests > 0 {
		s.Wait = waits / requests
	}
	d.Say("\n  It says of the disk: a write takes %.2f ms; and of the process: %s wrote %d times, %d bytes.\n  The process itself measured %.2f ms a write.\n\n", s.Wait, s.Comm, s.Writes, s.Bytes, s.Taken)
	d.Claim(s.Wait >= s.Held && s.Wait <= s.Taken, "io names the disk: %.2f ms a write, at least the %.0f ms for which the demo held it, at most what the process measured", s.Wait, s.Held)
	d.Claim(s.Comm == "demo-writer" && s.Writes == slowWrites && s.Bytes == slowWrites*writeBytes && s.Others == 0, "io names the process that writes, and its %d writes of %d bytes, exactly", s.Writes, s.Bytes)
	return nil
}

// attachLoop makes a disk of a file. The disk goes with its last user.
func (d *demo) attachLoop(file *os.File) (device string, err error) {
	control, err := unix.Open("/dev/loop-control", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("make a loop device: %w; `modprobe loop` may help", err)
	}
	defer unix.Close(control)
	for {
		number, err := unix.IoctlRetInt(control, unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return "", fmt.Errorf("find a free loop device: %w", err)
		}
		device = fmt.Sprintf("/dev/loop%d", number)
		fd, err := unix.Open(device, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return "", fmt.Errorf("open a loop device: %w", err)
		}
		config := unix.LoopConfig{Fd: uint32(file.Fd()), Size: blockSize, Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}}
		err = unix.IoctlLoopConfigure(fd, &config)
		if err == nil {
			d.atEnd(func() error { return errors.Join(unix.IoctlSetInt(fd, unix.LOOP_CLR_FD, 0), unix.Close(fd)) })
			return device, nil
		}
		_ = unix.Close(fd) // the device was not used
		if !errors.Is(err, unix.EBUSY) {
			return "", fmt.Errorf("make a loop device of a file: %w", err)
		} // another process took the device first
	}
}
