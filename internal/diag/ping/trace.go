package ping

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/sensor"
)

// Sensors are a host's sensors, in the order of the first lines.
var Sensors = []sensor.Sensor{
	both("queue", "packets that leave: the queueing discipline takes them", "net_dev_queue", "sh_queue", "the time in the queue is part of the stage before or after it"),
	both("driver", "packets that leave: the driver takes them", "net_dev_start_xmit", "sh_driver", "the time in the queue and on the wire is one stage"),
	both("backlog", "packets that arrive: a virtual driver hands them over", "netif_rx", "sh_backlog", "on virtual devices, waiting for the softirq is part of the wire"),
	both("napi", "packets that arrive: a driver hands them over", "napi_gro_receive_entry", "sh_napi", "waiting for the softirq is part of the wire"),
	both("stack", "packets that arrive: the network stack begins with them", "netif_receive_skb", "sh_stack", "the softirq is part of another stage"),
	both("drops", "packets that the kernel drops, and why", "kfree_skb", "sh_drop", "reasons of drops are not known"),
	both("wakeup", "the receiving thread is put on a run queue", "sched_wakeup", "sh_wake", "waiting for the wake-up and for a CPU is one stage"),
}

// both returns a sensor at a tracepoint, with the kernel's check of types or without.
func both(name, watches, tracepoint, program, without string) sensor.Sensor {
	return sensor.Sensor{Name: name, Watches: watches, Without: without, Ways: []sensor.Way{
		{Kind: sensor.TPBTF, Target: tracepoint, Program: program + "_btf"},
		{Kind: sensor.RawTP, Target: tracepoint, Program: program + "_raw", Loses: "the kernel does not check the arguments' types"},
	}}
}

// The kernel's names of the shared types.
type (
	row    = pingPingRow
	thread = pingPingThread
)

const (
	rowsMin    = uint64(pingPingConstantPING_ROWS_MIN)
	rowsMax    = uint64(pingPingConstantPING_ROWS_MAX)
	rowsServer = uint64(pingPingConstantPING_ROWS)
	trailCount = uint64(pingPingConstantPING_TRAILS)
)

// The maps that are mapped, by their index in recorder.memory.
const (
	rowMemory = iota
	threadMemory
	trailMemory
	memoryCount
)

// recorder stamps the probes that pass this host. It belongs to the thread that opened it: the recorder stamps that thread's
// wake-ups, and watches its network namespace.
type recorder struct {
	set     *sensor.Set
	btf     sensor.BTF
	filter  *ebpf.Collection
	memory  [memoryCount][]byte
	thread  *thread
	ahead   int64 // ns by which the kernel's clock is ahead of the process's, in a time namespace
	reasons map[uint32]string
	// everywhere: places in all network namespaces are noted.
	everywhere bool
	rows       uint64 // probes that are remembered; a power of two
}

func number(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

// open attaches the sensors, with memory for rows probes; session 0: of a server. everywhere: places in all network
// namespaces are noted. udp: probes may be of UDP, too.
func open(types sensor.BTF, session, rows uint64, everywhere, udp bool) (*recorder, error) {
	spec, err := loadPing()
	if err != nil {
		return nil, fmt.Errorf("read the BPF object of diag ping: %w", err)
	}
	netns, err := host.Netns()
	if err != nil {
		return nil, err
	}
	r := &recorder{btf: types, everywhere: everywhere, rows: rows}
	if r.ahead, err = clockAhead("/proc/self/timens_offsets"); err != nil {
		return nil, err
	}
	spec.Maps[pingMapShPingRows].MaxEntries = uint32(rows)
	if !everywhere {
		spec.Maps[pingMapShPingTrails].MaxEntries = 1
	}
	r.set, err = sensor.Open(spec, Sensors, sensor.Options{BTF: types, Constants: map[string]any{
		"is_server": number(session == 0), "only_session": session, "only_netns": uint32(netns), "row_mask": uint32(rows - 1), "all_netns": number(everywhere), "with_udp": number(udp)}})
	if err != nil {
		return nil, errors.Join(err, r.close())
	}
	if err := errors.Join(r.mapRows(), r.load(spec)); err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

// mapRows makes the maps readable without a system call.
func (r *recorder) mapRows() error {
	for i, name := range [memoryCount]string{rowMemory: pingMapShPingRows, threadMemory: pingMapShPingThread, trailMemory: pingMapShPingTrails} {
		m := r.set.Maps[name]
		size := int(m.MaxEntries()) * int(m.ValueSize())
		memory, err := unix.Mmap(m.FD(), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return fmt.Errorf("map %s of %d bytes: %w", name, size, err)
		}
		r.memory[i] = memory
	}
	r.thread = (*thread)(unsafe.Pointer(&r.memory[threadMemory][0]))
	return nil
}

// load loads the programs that are no sensors: the socket's filter, and the program that learns the number of this
// thread.
func (r *recorder) load(spec *ebpf.CollectionSpec) error {
	rest := spec.Copy()
	for name := range rest.Programs {
		if name != pingProgShPingFilter && name != pingProgShPingMe {
			delete(rest.Programs, name)
		}
	}
	var err error
	r.filter, err = ebpf.NewCollectionWithOptions(rest, ebpf.CollectionOptions{
		MapReplacements: r.set.Maps, Programs: ebpf.ProgramOptions{KernelTypes: r.btf.Spec}})
	if err != nil {
		return fmt.Errorf("load the socket's filter: %w", err)
	}
	if _, err := r.filter.Programs[pingProgShPingMe].Run(&ebpf.RunOptions{}); err != nil {
		return fmt.Errorf("write the receiving thread for the programs: %w", err)
	}
	return nil
}

func (r *recorder) close() error {
	var errs []error
	if r.filter != nil {
		r.filter.Close()
	}
	for _, memory := range r.memory {
		if memory != nil {
			errs = append(errs, unix.Munmap(memory))
		}
	}
	if r.set != nil {
		errs = append(errs, r.set.Close())
	}
	return errors.Join(errs...)
}

// now returns the kernel's CLOCK_MONOTONIC, in ns.
func (r *recorder) now() uint64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // fails for clocks that do not exist
	return uint64(t.Nano() + r.ahead)
}

// clockAhead returns the time by which the kernel's clock is ahead of the clock that this process sees, in ns; 0 on a
// kernel without time namespaces (time_namespaces(7)).
func clockAhead(path string) (int64, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read the offsets of the time namespace: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		var name string
		var seconds, ns int64
		if n, _ := fmt.Sscan(line, &name, &seconds, &ns); n == 3 && name == "monotonic" {
			return -(seconds*1e9 + ns), nil
		}
	}
	return 0, fmt.Errorf("read the offsets of the time namespace: %s has no line of the clock monotonic", path)
}

// position returns the position of a probe in a map of count elements, as position_of() of bpf/diag/ping.bpf.c.
func position(session, sequence, count uint64) uint64 {
	return (session*0x9e3779b97f4a7c15>>32 + sequence) & (count - 1)
}

// at returns the probe's row, which another one may have taken.
func (r *recorder) at(session, sequence uint64) *row {
	return (*row)(unsafe.Pointer(&r.memory[rowMemory][position(session, sequence, r.rows)*uint64(unsafe.Sizeof(row{}))]))
}

// begin makes the row of a probe before it is sent.
func (r *recorder) begin(session, sequence uint64) {
	p := r.at(session, sequence)
	atomic.StoreUint64(&p.Session, 0)
	for i := range p.AtNs {
		atomic.StoreUint64(&p.AtNs[i], 0)
	}
	atomic.StoreUint64(&p.DroppedNs, 0)
	atomic.StoreUint64(&p.Sequence, sequence)
	atomic.StoreUint64(&p.Session, session)
}

// look returns the present row of a probe; false: the row has been given to another.
func (r *recorder) look(session, sequence uint64) (row, bool) {
	p := r.at(session, sequence)
	var v row
	for i := range p.AtNs {
		v.AtNs[i] = atomic.LoadUint64(&p.AtNs[i])
	}
	v.DroppedNs = atomic.LoadUint64(&p.DroppedNs)
	v.DropReason = atomic.LoadUint32(&p.DropReason)
	v.Sequence, v.Session = atomic.LoadUint64(&p.Sequence), atomic.LoadUint64(&p.Session)
	return v, v.Sequence == sequence && v.Session == session
}

// reached returns when the probe or its answer reached the socket; 0: not known.
func (r *recorder) reached(session, sequence uint64) uint64 {
	p := r.at(session, sequence)
	at := atomic.LoadUint64(&p.AtNs[pingPingPointPING_POINT_SOCKET])
	if atomic.LoadUint64(&p.Sequence) != sequence || atomic.LoadUint64(&p.Session) != session {
		return 0
	}
	return at
}

// left returns when the probe was given to the driver; 0: not yet, or not known.
func (r *recorder) left(session, sequence uint64) uint64 {
	return atomic.LoadUint64(&r.at(session, sequence).AtNs[pingPingPointPING_POINT_DRIVER])
}

// wokenBetween returns when the thread was woken last, if that was between the socket and the process; otherwise 0.
func (r *recorder) wokenBetween(socket, user uint64) uint64 {
	if woken := atomic.LoadUint64(&r.thread.WokenNs); socket != 0 && socket <= woken && woken <= user {
		return woken
	}
	return 0
}

// reason returns the kernel's name of a reason to drop a packet.
func (r *recorder) reason(number uint32) string {
	if r.reasons == nil {
		r.reasons = map[uint32]string{}
		types := r.btf.Spec
		if types == nil {
			types, _ = btf.LoadKernelSpec() // without names, reasons are numbers
		}
		var enum *btf.Enum
		if types != nil && types.TypeByName("skb_drop_reason", &enum) == nil {
			for _, v := range enum.Values {
				r.reasons[uint32(v.Value)] = strings.TrimPrefix(strings.TrimPrefix(v.Name, "SKB_DROP_REASON_"), "SKB_")
			}
		}
	}
	if name, known := r.reasons[number]; known {
		return name
	}
	return fmt.Sprintf("reason %d", number)
}

// debug describes the programs and maps that the kernel has accepted, its reasons where it refused, and the sockets.
func (r *recorder) debug(w io.Writer, sockets ...*socket) {
	for _, result := range r.set.Results {
		for _, refused := range result.Refused {
			fmt.Fprintf(w, "debug: sensor %s: %v is refused: %+v\n", result.Sensor.Name, refused.Way, refused.Err)
		}
		if result.Got != nil {
			fmt.Fprintf(w, "debug: sensor %s: program %s is at %v\n", result.Sensor.Name, result.Got.Program, *result.Got)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.set.Maps)) {
		m := r.set.Maps[name]
		fmt.Fprintf(w, "debug: map %s: %v of %d elements of %d bytes\n", name, m.Type(), m.MaxEntries(), m.ValueSize())
	}
	for _, s := range sockets {
		room, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
		fmt.Fprintf(w, "debug: socket, IPv6 %v, UDP %v: room for %d bytes, of %d asked for; error: %v\n", s.is6, s.isUDP, room, receiveBytes, err)
	}
	fmt.Fprintf(w, "debug: the kernel's clock is %d ns ahead of this process's\n", r.ahead)
}

// Examine attaches the sensors as a client does and detaches them again.
func Examine(types sensor.BTF) ([]sensor.Result, error) {
	r, err := open(types, 1, rowsMin, false, false)
	if err != nil {
		return nil, err
	}
	return r.set.Results, r.close()
}
