package vdisk

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/diag/lasting"
	"github.com/shunt-lb/shunt/internal/diag/line"
	"github.com/shunt-lb/shunt/internal/diag/symbol"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

// Options select the machine, the recording and its limits.
type Options struct {
	BTF      sensor.BTF
	Guest    bool   // this is the virtual machine; otherwise its host
	PID      int    // the virtual machine's process; of a guest 0
	Path     string // the recording; it must not exist
	Duration time.Duration
	Limit    int64 // bytes of events; the head and the tail, which has the maps of the images, come on top
	Probes   []Probe
	MaxCPU   float64 // share of one CPU that the sensors may take, in percent; 0: any

	ready   func()          // nil, or called when the sensors are attached
	sensors []sensor.Sensor // nil: all
	statfs  func(string, *unix.Statfs_t) error
}

const (
	// bufferBytes has room for 60,000 events, so that a late reader loses none of a fast disk's.
	bufferBytes = 8 << 20
	// batch is the interval at which the recorder takes the events.
	batch = 20 * time.Millisecond
)

// recorder writes events down. It is for one goroutine.
type recorder struct {
	o       Options
	set     *sensor.Set
	reader  *event.Reader
	file    *os.File
	out     *bufio.Writer
	written int64
	skipped uint64
	isFull  bool
	head    Head
	start   uint64 // of the process
	files   []opened
	seen    map[int32]bool // descriptors that were looked up
	frame   []byte
	guest   guestRecorder
	budget  *sensor.Budget
	began   time.Time
	kept    time.Time // time of the last look at the budget
	changes []string  // changes for the budget
}

// Record records the disk IO of one virtual machine's process, until the context, the duration, the process
// or the file ends, and writes the outcome to said.
func Record(ctx context.Context, o Options, said io.Writer) (err error) {
	r, err := openRecorder(o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.release()) }()
	for _, s := range r.set.Results {
		fmt.Fprintln(said, s)
	}
	fmt.Fprintf(said, "types: %s\n", o.BTF.From)
	for _, note := range r.head.Notes {
		fmt.Fprintln(said, note)
	}
	if o.ready != nil {
		o.ready()
	}
	limited, cancel := lasting.For(ctx, o.Duration)
	defer cancel()
	why, err := r.take(limited)
	if err != nil {
		return err
	}
	if limited.Err() != nil && ctx.Err() == nil {
		why = "the duration is over"
	}
	tail := Tail{Seconds: time.Since(r.began).Seconds(), Ended: why}
	// The tail is written even if the user stops the command again.
	if err := r.end(context.WithoutCancel(ctx), &tail); err != nil {
		return err
	}
	fmt.Fprintf(said, "recorded %d events in %.1f s, %d lost, into %s; %s\n", tail.Events.Received-r.skipped, tail.Seconds, tail.Events.Lost, o.Path, tail.Ended)
	for _, note := range tail.Notes {
		fmt.Fprintln(said, note)
	}
	return nil
}

func openRecorder(o Options) (r *recorder, err error) {
	if runtime.GOARCH != "amd64" {
		return nil, fmt.Errorf("record requests of a virtual machine: shunt knows qemu's registers on amd64 only, and this is %s", runtime.GOARCH)
	}
	if o.statfs == nil {
		o.statfs = unix.Statfs
	}
	r = &recorder{o: o, seen: map[int32]bool{}}
	r.head.BTF, r.head.Began, r.head.Notes = o.BTF.From, time.Now().Format(time.RFC3339Nano), []string{}
	of := sensor.Process{}
	if o.Guest {
		err = r.beginGuest()
	} else {
		of, err = r.beginHost()
	}
	if err != nil {
		return nil, err
	}
	if err := checkProbes(o.Probes, o.Guest, of.Executable); err != nil {
		return nil, err
	}
	for _, p := range o.Probes {
		r.head.Probes = append(r.head.Probes, p.String())
	}
	end, err := symbol.Address("iomap_dio_bio_end_io")
	if err != nil {
		r.head.Notes = append(r.head.Notes, fmt.Sprintf("IO past the page cache by io_submit() and io_uring is not joined to the disk: %v", err))
	}
	spec, err := loadVdisk()
	if err != nil {
		return nil, fmt.Errorf("read the BPF object of diag vdisk: %w", err)
	}
	spec.Maps[event.MapEvents].MaxEntries = bufferBytes
	r.set, err = sensor.Open(spec, append(slices.Clone(r.o.sensors), probeSensors(o.Probes)...), sensor.Options{BTF: o.BTF, Constants: map[string]any{"only_tgid": uint32(o.PID), "iomap_dio_end": end},
		Process: of,
		Prepare: func(maps map[string]*ebpf.Map) error {
			if r.reader, err = event.NewReader(maps[event.MapEvents], maps[event.MapSequence]); err != nil {
				return err
			}
			return r.tellFiles(maps[vdiskMapShVdFiles])
		}})
	if err == nil {
		err = unattached(o.Probes, r.set.Results)
	}
	if err != nil {
		return nil, errors.Join(err, r.release())
	}
	r.head.Sensors = line.Sensors(r.set.Results)
	r.began, r.kept = time.Now(), time.Now()
	if r.budget, err = sensor.NewBudget(o.MaxCPU, sensor.Member{Set: r.set, Sheds: sheds}); err != nil {
		return nil, errors.Join(err, r.release())
	}
	// Other users must not read the places of a machine's data.
	r.file, err = os.OpenFile(o.Path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make the recording: %w", err), r.release())
	}
	r.out = bufio.NewWriterSize(r.file, 1<<20)
	_, err = r.out.WriteString(magic)
	if err == nil {
		_, err = writeJSON(r.out, frameHead, r.head)
	}
	if err != nil {
		return nil, errors.Join(r.writing(err), r.release())
	}
	return r, nil
}

// beginHost reads the facts of the virtual machine's process.
func (r *recorder) beginHost() (of sensor.Process, err error) {
	if r.o.sensors == nil {
		r.o.sensors = sensors()
	}
	r.head.Kind, r.head.PID = KindHost, r.o.PID
	of = sensor.Process{PID: r.o.PID, Executable: fmt.Sprintf("/proc/%d/exe", r.o.PID)}
	if r.head.Comm, r.start, err = identity(r.o.PID); err != nil {
		return of, err
	}
	if r.files, err = openFiles(r.o.PID, r.o.statfs); err != nil {
		return of, err
	}
	if r.head.Executable, err = os.Readlink(of.Executable); err != nil {
		return of, fmt.Errorf("find the program of process %d: %w", r.o.PID, err)
	}
	return of, nil
}

func (r *recorder) writing(err error) error {
	return fmt.Errorf("write the recording %s: %w", r.o.Path, err)
}

// tellFiles tells the programs which files the process has open.
func (r *recorder) tellFiles(files *ebpf.Map) error {
	for _, f := range r.files {
		key := vdiskVdiskFile{Inode: f.inode, Device: f.device}
		err := files.Put(key, uint8(1))
		if errors.Is(err, unix.E2BIG) {
			r.head.Notes = append(r.head.Notes, fmt.Sprintf("process %d has more than %d files: of the others, IO that a cgroup's limit holds back is not seen", r.o.PID, vdiskVdiskConstantVDISK_FILES_MAX))
			return nil
		}
		if err != nil {
			return fmt.Errorf("write the process's files for the programs: %w", err)
		}
	}
	return nil
}

// take records events until there is a reason to end, which it returns.
func (r *recorder) take(ctx context.Context) (why string, err error) {
	ticks := time.NewTicker(batch)
	defer ticks.Stop()
	for {
		if err := r.reader.Drain(r.write); err != nil {
			return "", err
		}
		if r.isFull {
			return "", nil // end says it
		}
		if why, err := r.keep(); err != nil || why != "" {
			return why, err
		}
		if !r.o.Guest {
			if _, start, err := identity(r.o.PID); err != nil || start != r.start {
				return "the process has ended", nil
			}
		}
		select {
		case <-ctx.Done():
			return "it was stopped", nil
		case <-ticks.C:
		}
	}
}

// budgetStep is the interval at which the recorder looks at its budget.
const budgetStep = time.Second

// keep looks at the budget if it is time to. Requests cannot be sampled, because only the end shows the events that
// belong to one; so if no further sensor can be detached, the recording ends.
func (r *recorder) keep() (why string, err error) {
	if r.budget == nil || time.Since(r.kept) < budgetStep {
		return "", nil
	}
	r.kept = time.Now()
	s, err := r.budget.Keep()
	if err != nil || s.Change == "" {
		return "", err
	}
	if s.AtEnd {
		return s.Change, nil
	}
	r.changes = append(r.changes, fmt.Sprintf("after %.1f s %s", time.Since(r.began).Seconds(), s.Change))
	return "", nil
}

func (r *recorder) write(e event.Event) error {
	if r.o.Guest && r.guest.names.Learn(e) {
		return nil
	}
	if len(e.Payload) != eventBytes-16 {
		return fmt.Errorf("an event has %d bytes: the programs are of another version of shunt", len(e.Payload))
	}
	if r.isFull = r.isFull || r.written+frameBytes+eventBytes > r.o.Limit; r.isFull {
		r.skipped++
		return nil
	}
	if err := r.learn(e.Payload); err != nil {
		return err
	}
	r.guest.meet(e)
	r.frame = appendEvent(r.frame[:0], e)
	r.written += int64(len(r.frame))
	if _, err := r.out.Write(r.frame); err != nil {
		return r.writing(err)
	}
	return nil
}

// learn looks at the process's files again when an event names a new descriptor: disks come and go.
func (r *recorder) learn(payload []byte) error {
	if r.o.Guest {
		return nil
	}
	kind := vdiskVdiskKind(payload[kindAt])
	descriptor := int32(binary.LittleEndian.Uint32(payload[resultAt:]))
	if kind != vdiskVdiskKindVDISK_CALL && kind != vdiskVdiskKindVDISK_PART || r.seen[descriptor] {
		return nil
	}
	r.seen[descriptor] = true
	if slices.ContainsFunc(r.files, func(f opened) bool { return f.descriptor == int(descriptor) }) {
		return nil
	}
	later, err := openFiles(r.o.PID, r.o.statfs)
	if errors.Is(err, os.ErrNotExist) {
		return nil // the process has ended
	}
	if err != nil {
		return err
	}
	r.files = append(r.files, later...)
	return r.tellFiles(r.set.Maps[vdiskMapShVdFiles])
}

// The offsets of fields in struct vdisk_event, in bytes.
const (
	resultAt = int(unsafe.Offsetof(vdiskVdiskEvent{}.Result))
	kindAt   = int(unsafe.Offsetof(vdiskVdiskEvent{}.Kind))
)

// end detaches the sensors, records the rest, and finds the places of the files.
func (r *recorder) end(ctx context.Context, tail *Tail) error {
	missed, err := r.set.Missed()
	if err != nil {
		return err
	}
	tail.NotRun = map[string]uint64{}
	for name, n := range missed {
		if n > 0 {
			tail.NotRun[name] = n
		}
	}
	if err := r.set.Detach(); err != nil {
		return err
	}
	var failed error
	tail.Events, err = r.reader.Close(func(e event.Event) { failed = errors.Join(failed, r.write(e)) })
	if err = errors.Join(err, failed); err != nil {
		return err
	}
	tail.Skipped = r.skipped
	if r.isFull {
		tail.Ended = fmt.Sprintf("the recording has reached its limit of %d bytes", r.o.Limit)
	}
	if err := r.out.Flush(); err != nil {
		return r.writing(err)
	}
	if r.o.Guest {
		tail.Tasks = r.guest.tasks
	} else if later, err := openFiles(r.o.PID, r.o.statfs); err == nil {
		r.files = append(r.files, later...)
	}
	if err := r.locate(ctx, tail); err != nil {
		return err
	}
	if _, err := writeJSON(r.out, frameTail, tail); err != nil {
		return r.writing(err)
	}
	if err := r.out.Flush(); err != nil {
		return r.writing(err)
	}
	return nil
}

// locate reads the recording again, to find the files whose places are needed.
func (r *recorder) locate(ctx context.Context, tail *Tail) error {
	f, err := os.Open(r.o.Path)
	if err != nil {
		return fmt.Errorf("read the recording again: %w", err)
	}
	defer f.Close() //nolint:errcheck // only read
	rec, err := Decode(bufio.NewReaderSize(f, 1<<20))
	if err != nil {
		return fmt.Errorf("read the recording again: %w", err)
	}
	devices := map[uint32]bool{}
	for _, e := range rec.Events {
		devices[e.Device] = true
	}
	tail.Notes = append([]string{}, r.changes...)
	if r.o.Guest {
		var notes []string
		tail.Files, notes = r.guest.files(rec.Events)
		tail.Notes = append(tail.Notes, notes...)
	} else {
		tail.Files = usedFiles(rec.Events, r.files)
	}
	for _, file := range tail.Files {
		devices[file.Device], devices[file.Block] = true, true
	}
	delete(devices, 0)
	tail.Disks = []Disk{}
	for device := range devices {
		tail.Disks = append(tail.Disks, findDisk(device))
	}
	slices.SortFunc(tail.Disks, func(a, b Disk) int { return int(a.Device) - int(b.Device) })
	if r.o.Guest {
		return nil
	}
	same := sameOffsets(join(rec.Events, tail.Disks, rec.isBare()), tail.Files)
	for i := range tail.Files {
		file := &tail.Files[i]
		// Data that the guest wrote into a raw image may look like another format: qemu-img must not guess.
		if same[i] {
			file.Format = "raw"
		} else if err := describe(ctx, file); err != nil {
			tail.Notes = append(tail.Notes, err.Error())
		}
		if file.Block == 0 {
			if file.Extents, err = readExtents(file.Path); err != nil {
				tail.Notes = append(tail.Notes, err.Error())
			}
		}
	}
	return nil
}

// usedFiles returns the files that a system call or a bio names.
func usedFiles(events []Event, known []opened) []File {
	type inodeKey struct {
		inode  uint64
		device uint32
	}
	descriptors, inodes := map[int]bool{}, map[inodeKey]bool{}
	for _, e := range events {
		switch vdiskVdiskKind(e.Kind) {
		case vdiskVdiskKindVDISK_CALL:
			if e.Id != numberIOSubmit && e.Id != numberIOUringEnter {
				descriptors[int(e.Result)] = true
			}
		case vdiskVdiskKindVDISK_PART:
			descriptors[int(e.Result)] = true
		case vdiskVdiskKindVDISK_BIO:
			if e.Inode != 0 {
				inodes[inodeKey{e.Inode, e.FileDevice}] = true
			}
		}
	}
	files := []File{}
	for _, o := range known {
		if !descriptors[o.descriptor] && !inodes[inodeKey{o.inode, o.device}] {
			continue
		}
		i := slices.IndexFunc(files, func(f File) bool { return f.Inode == o.inode && f.Device == o.device })
		if i < 0 {
			i = len(files)
			files = append(files, File{Path: o.path, Device: o.device, Inode: o.inode, Size: o.size, Block: o.block})
		}
		files[i].Direct = files[i].Direct || o.direct
		if !slices.Contains(files[i].Descriptors, o.descriptor) {
			files[i].Descriptors = append(files[i].Descriptors, o.descriptor)
		}
	}
	return files
}

// isBare reports whether requests of the device model are missing in the recording, because their sensors were not attached.
func (rec *Recording) isBare() bool {
	missing := 0
	for _, s := range rec.Head.Sensors {
		if s.Way == "" && s.Loses == withoutBegin {
			missing++
		}
	}
	return missing > 0 && !slices.ContainsFunc(rec.Events, func(e Event) bool { return vdiskVdiskKind(e.Kind) == vdiskVdiskKindVDISK_BEGIN })
}

// fileOf returns the index of a piece's file; -1: not known.
func fileOf(p *piece, files []File) int {
	for _, b := range p.bios {
		if b.inode != 0 {
			return slices.IndexFunc(files, func(f File) bool { return f.Inode == b.inode && f.Device == b.fileDevice })
		}
	}
	if p.call == 0 {
		return -1
	}
	return slices.IndexFunc(files, func(f File) bool { return slices.Contains(f.Descriptors, p.descriptor) })
}

// sameOffsets reports by file whether it has pieces, and each of them is in its request also by its offset.
func sameOffsets(j joined, files []File) map[int]bool {
	same := map[int]bool{}
	for _, r := range j.requests {
		if r.isBare {
			continue
		}
		for _, p := range r.pieces {
			i := fileOf(p, files)
			if i < 0 || !hasOffset(p.op) {
				continue
			}
			// It is aligned to a page at most, so it may begin a little before.
			here := p.offset+4096 > r.offset && p.offset <= r.offset+r.bytes
			if before, is := same[i]; !is {
				same[i] = here
			} else {
				same[i] = before && here
			}
		}
	}
	return same
}

func (r *recorder) release() error {
	var errs []error
	if r.reader != nil {
		_, err := r.reader.Close(nil)
		errs = append(errs, err)
	}
	errs = append(errs, r.budget.Close(), r.set.Close())
	if r.file != nil {
		if err := r.file.Close(); err != nil {
			errs = append(errs, r.writing(err))
		}
	}
	return errors.Join(errs...)
}

// Examine attaches the sensors in the kernel, of the host's half or of the guest's, as Record does, and detaches them
// again: those in qemu depend on the process. If there could be no recording, the error is sensor.ErrNoWay, and the results are
// complete.
func Examine(b sensor.BTF, guest bool) ([]sensor.Result, error) {
	spec, err := loadVdisk()
	if err != nil {
		return nil, fmt.Errorf("read the BPF object of diag vdisk: %w", err)
	}
	inKernel := guestSensors()
	if !guest {
		inKernel = slices.DeleteFunc(sensors(), func(s sensor.Sensor) bool { return s.Ways[0].Kind == sensor.Uprobe })
	}
	set, err := sensor.Open(spec, inKernel, sensor.Options{BTF: b})
	if set == nil {
		return nil, err
	}
	return set.Results, errors.Join(err, set.Close())
}
