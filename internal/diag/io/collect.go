package io

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/diag/symbol"
	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/sensor"
)

// Sensors are the sensors of the view, in the order of its first lines.
var Sensors = []sensor.Sensor{
	{
		Name: "requests", Watches: "IO that enters the block layer: process, file, bytes",
		Ways: []sensor.Way{
			{Kind: sensor.TPBTF, Target: "block_bio_queue", Program: "sh_bio_btf"},
			{Kind: sensor.RawTP, Target: "block_bio_queue", Program: "sh_bio_raw", Loses: uncheckedTypes},
		},
	},
	{
		Name: writers, Watches: "pages that are written to the page cache: the process to charge when they are flushed",
		Ways: []sensor.Way{
			{Kind: sensor.TPBTF, Target: "writeback_dirty_folio", Program: "sh_dirty_btf"},
			{Kind: sensor.RawTP, Target: "writeback_dirty_folio", Program: "sh_dirty_raw", Loses: uncheckedTypes},
		},
		Without: withoutWriters,
	},
	{
		Name: disks, Watches: "requests that a disk has ended: their time in the queue and in the device",
		Ways: []sensor.Way{
			{Kind: sensor.TPBTF, Target: "block_rq_complete", Program: "sh_end_btf"},
			{Kind: sensor.RawTP, Target: "block_rq_complete", Program: "sh_end_raw", Loses: uncheckedTypes},
		},
		Without: "waits of requests are in whole milliseconds, and not told apart by queue and device",
	},
}

// Names of the sensors that a budget may detach.
const (
	writers        = "writers"
	disks          = "disks"
	withoutWriters = "flushed writes are unattributed"
)

// sampleMax is the N of the smallest sample 1/N. Smaller ones cost as much, because most of the cost is then the call of the program.
const sampleMax = 256

const uncheckedTypes = "the kernel does not check the arguments' types"

// The kernel's names of the shared types.
type (
	file    = ioIoFile
	rowKey  = ioIoKey
	counted = ioIoCount
	disk    = ioIoDisk
)

const rowsMax = uint32(ioIoConstantIO_ROWS_MAX)

// Options select the IO that is watched.
type Options struct {
	BTF   sensor.BTF
	Inode uint64 // only files with this inode number; 0: all IO
	// Duration counts from the moment when the sensors are attached; 0: until the context ends.
	Duration time.Duration
	// Sizes: writes are counted by size too.
	Sizes bool
	// MaxCPU is the share of one CPU that the sensors may take, in percent; 0: any.
	MaxCPU float64

	rows    uint32          // instead of IO_ROWS_MAX; 0: that
	sensors []sensor.Sensor // in place of Sensors; nil: Sensors
}

// Collector watches the IO of this machine. It is for one goroutine, beside its own, which takes names of files.
type Collector struct {
	set    *sensor.Set
	reader *event.Reader
	names  names
	mu     sync.Mutex    // guards the reader and the names
	failed error         // why no names are taken any more
	ending chan struct{} // is closed when no more names are to be taken; nil: they never were
	ended  chan struct{} // is closed after that
	rows   [2]*ebpf.Map  // one is filled by the programs, the other is empty
	filled int
	began  time.Time

	ledger ledger
	disks  map[uint32]disk // at the last reading
	stats  map[string]diskstat
	// unseen is by disk of the start, for reads and for writes; endsUnseen: the numbers of reads and writes that ended without the sensor since the last interval.
	unseen     map[string]*[2]unseen
	endsUnseen [2]uint64
	// writesTwice: writes with a flush are counted twice, so writes are not compared.
	writesTwice bool

	missed ioIoBytes
	notRun map[string]uint64
	notes  []string
	sample uint32 // one IO in this number is watched
	// sampled: at some time not every IO was watched.
	sampled bool
	budget  *sensor.Budget
}

// Open begins to watch.
func Open(o Options) (*Collector, error) {
	spec, err := loadIo()
	if err != nil {
		return nil, fmt.Errorf("read the BPF object of diag io: %w", err)
	}
	spec.Maps[event.MapEvents].MaxEntries = eventBytes
	if o.rows > 0 {
		spec.Maps[ioMapShIoRows].InnerMap.MaxEntries = o.rows
	}
	c := &Collector{ledger: newLedger(), names: newNames(), disks: map[uint32]disk{}, sample: 1}
	ends, hidden := symbol.Addresses("iomap_dio_bio_end_io", "mq_flush_data_end_io")
	if hidden[0] != nil {
		c.notes = append(c.notes, fmt.Sprintf("reads and writes past the page cache have no file: %v", hidden[0]))
	}
	if hidden[1] != nil {
		c.notes = append(c.notes, fmt.Sprintf("writes that end unseen are not counted, and the times of writes with a flush count twice: %v", hidden[1]))
	}
	c.writesTwice = hidden[1] != nil
	sensors := Sensors
	if o.sensors != nil {
		sensors = o.sensors
	}
	c.set, err = sensor.Open(spec, sensors, sensor.Options{
		Constants: map[string]any{"only_inode": o.Inode, "iomap_dio_end": ends[0], "flush_data_end": ends[1], "with_sizes": number(o.Sizes)},
		BTF:       o.BTF,
		Prepare:   func(maps map[string]*ebpf.Map) error { return c.prepare(spec, maps) },
	})
	if err != nil {
		return nil, errors.Join(err, c.release())
	}
	c.began = time.Now()
	sums, err := c.diskSums()
	if err == nil {
		_, err = c.diskRows(0)
	}
	if err != nil {
		return nil, errors.Join(err, c.release())
	}
	c.compareEnds(sums)
	c.ending, c.ended = make(chan struct{}), make(chan struct{})
	go c.takeNames()
	if c.budget, err = sensor.NewBudget(o.MaxCPU, c.Member()); err != nil {
		return nil, errors.Join(err, c.release())
	}
	return c, nil
}

// Member returns the collector's part in a budget.
func (c *Collector) Member() sensor.Member {
	return sensor.Member{Set: c.set, Unit: "IO", SampleMax: sampleMax, Rises: true, Note: ", and rows are estimates", Sheds: []string{disks, writers},
		Resample: func(one uint32) error {
			if err := c.set.SetSample("sample_mask", one); err != nil {
				return err
			}
			c.sample, c.sampled = one, c.sampled || one != 1
			return nil
		}}
}

// prepare gives the programs a map of rows, and begins to read events.
func (c *Collector) prepare(spec *ebpf.CollectionSpec, maps map[string]*ebpf.Map) error {
	for i := range c.rows {
		var err error
		if c.rows[i], err = ebpf.NewMap(spec.Maps[ioMapShIoRows].InnerMap); err != nil {
			return fmt.Errorf("make a map of %d rows: %w", rowsMax, err)
		}
	}
	if err := maps[ioMapShIoRows].Put(uint32(0), c.rows[0]); err != nil {
		return fmt.Errorf("give the programs the map of rows: %w", err)
	}
	var err error
	c.reader, err = event.NewReader(maps[event.MapEvents], maps[event.MapSequence])
	return err
}

// Results returns how the sensors are attached.
func (c *Collector) Results() []sensor.Result { return c.set.Results }

// Notes returns further losses, one sentence each.
func (c *Collector) Notes() []string { return c.notes }

// Interval returns the IO since the last call, or since Open.
func (c *Collector) Interval() (Interval, error) {
	counts, err := c.swap()
	if err != nil {
		return Interval{}, err
	}
	now := time.Now()
	took := now.Sub(c.began)
	c.began = now
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := errors.Join(c.failed, c.learnNames()); err != nil {
		return Interval{}, err
	}
	i, err := c.account(counts, now, took)
	if err != nil {
		return i, err
	}
	i.Sample = c.sample
	i.Spending, err = c.budget.Keep()
	return i, err
}

// Spending returns the CPU time of the sensors since Open, and the reactions to it; nil: there is no budget.
func (c *Collector) Spending() *sensor.Spending { return c.budget.Total() }

// swap gives the programs the empty map, waits until none uses the other one any more, and empties that. The
// kernel does the waiting: bpf(2) does not return from changing a map of maps before synchronize_rcu() does
// (maybe_wait_bpf_programs in kernel/bpf/syscall.c).
func (c *Collector) swap() (map[rowKey]counted, error) {
	full := c.rows[c.filled]
	c.filled = 1 - c.filled
	if err := c.set.Maps[ioMapShIoRows].Put(uint32(0), c.rows[c.filled]); err != nil {
		return nil, fmt.Errorf("swap the map of rows: %w", err)
	}
	counts := map[rowKey]counted{}
	var key rowKey
	var value counted
	entries := full.Iterate()
	for entries.Next(&key, &value) {
		counts[key] = value
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read the rows: %w", err)
	}
	for key := range counts {
		if err := full.Delete(key); err != nil {
			return nil, fmt.Errorf("empty the map of rows: %w", err)
		}
	}
	return counts, nil
}

// namesEvery is the interval at which names are taken. The buffer of events has no room for those of a long interval.
const (
	namesEvery = 100 * time.Millisecond
	eventBytes = 4 << 20 // of the buffer: some 1,700 names
)

// takeNames takes the names of files as they come, until the collector is closed.
func (c *Collector) takeNames() {
	defer close(c.ended)
	ticks := time.NewTicker(namesEvery)
	defer ticks.Stop()
	for {
		select {
		case <-c.ending:
			return
		case <-ticks.C:
		}
		c.mu.Lock()
		c.failed = c.learnNames()
		failed := c.failed
		c.mu.Unlock()
		if failed != nil {
			return
		}
	}
}

// takeNoNames ends takeNames.
func (c *Collector) takeNoNames() {
	if c.ending != nil {
		close(c.ending)
		<-c.ended
		c.ending = nil
	}
}

// learnNames reads the events that have come.
func (c *Collector) learnNames() error {
	return c.reader.Drain(func(e event.Event) error {
		c.names.learn(e)
		return nil
	})
}

// decodePath reads struct io_path.
func decodePath(payload []byte) (file, name, error) {
	var p ioIoPath
	if err := binary.Read(bytes.NewReader(payload), binary.NativeEndian, &p); err != nil {
		return file{}, name{}, fmt.Errorf("decode a file's name: %w", err)
	}
	if int(p.NamesSize) > len(p.Names) {
		return file{}, name{}, fmt.Errorf("decode a file's name: it has %d bytes, and at most %d are possible", p.NamesSize, len(p.Names))
	}
	text := make([]byte, p.NamesSize)
	for i := range text {
		text[i] = byte(p.Names[i])
	}
	n := name{deleted: p.Links == 0, cut: p.IsCut != 0}
	for part := range strings.SplitSeq(strings.TrimSuffix(string(text), "\x00"), "\x00") {
		n.path = "/" + part + n.path
	}
	if p.NamesSize == 0 {
		n.path = ""
	}
	return p.File, n, nil
}

// readMissed returns the amount of IO that is in no row, since the start.
func (c *Collector) readMissed() (sum ioIoBytes, err error) {
	var all []ioIoBytes
	if err := c.set.Maps[ioMapShIoMissed].Lookup(uint32(ioIoMissedIO_MISSED_ROWS_FULL), &all); err != nil {
		return sum, fmt.Errorf("read the number of missed IOs: %w", err)
	}
	for _, one := range all {
		sum.Count += one.Count
		sum.Bytes += one.Bytes
	}
	return sum, nil
}

// readNotRun returns the number of times that the kernel did not run a sensor since the last call; sensors without such
// runs are left out.
func (c *Collector) readNotRun() (map[string]uint64, error) {
	all, err := c.set.Missed()
	if err != nil {
		return nil, err
	}
	since := map[string]uint64{}
	for sensor, n := range all {
		if n > c.notRun[sensor] {
			since[sensor] = n - c.notRun[sensor]
		}
	}
	c.notRun = all
	return since, nil
}

// Close ends the watching and returns the counts of the stream of names. IO since the last Interval is lost.
func (c *Collector) Close() (event.Summary, error) {
	c.takeNoNames()
	err := c.set.Detach()
	// The swap waits for the programs that still run.
	if _, swapped := c.swap(); swapped != nil {
		err = errors.Join(err, swapped)
	}
	summary, closed := c.reader.Close(c.names.learn)
	summary.Broken += c.names.broken
	return summary, errors.Join(err, closed, c.release())
}

func (c *Collector) release() error {
	c.takeNoNames()
	_, err := c.reader.Close(nil)
	errs := []error{err, c.budget.Close(), c.set.Close()}
	for _, m := range c.rows {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	return errors.Join(errs...)
}

// Examine attaches the sensors as Open does and detaches them again. If there would be no view, the error is
// sensor.ErrNoWay, and the results are complete.
func Examine(b sensor.BTF) ([]sensor.Result, error) {
	spec, err := loadIo()
	if err != nil {
		return nil, fmt.Errorf("read the BPF object of diag io: %w", err)
	}
	set, err := sensor.Open(spec, Sensors, sensor.Options{BTF: b})
	if set == nil {
		return nil, err
	}
	return set.Results, errors.Join(err, set.Close())
}
