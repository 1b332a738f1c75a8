// Package sockets pairs sockets of this machine, so that they hand each other their data past TCP, with programs at cgroups
// and at a map of sockets. Test finds out first whether this kernel does that correctly.
//
//	<folder>/            in bpffs, one for each Open
//	    sh_so_socks      the sockets
//	    sh_so_control    the limit, and whether pairs are taken apart
//
// A process that is killed leaves its pairs in place and working, within their limit, and no new pairs are made. Their
// maps are pinned so that the next process can take them apart: Drain.
//
// Needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON.
package sockets

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/value"
)

// Limits of the bytes that may wait at one end.
const (
	LimitMin     = 256 << 10
	LimitMax     = 1 << 30
	LimitDefault = 2 << 20
)

// SocketsMax is the largest number of sockets.
const SocketsMax = int(socketsSoLimitSO_SOCKETS_MAX)

// Options select the sockets that are paired.
type Options struct {
	Cgroups []string          // folders of a cgroup2 file system: sockets of the processes in them, and in cgroups below
	Ports   []value.PortRange // of either end; empty: all
	Limit   uint32            // bytes that may wait at one end
	Folder  string            // of a bpffs, must not exist; empty: nothing is pinned
}

// Sockets are the programs, their maps, and the pairs in these.
type Sockets struct {
	opts  Options
	coll  *ebpf.Collection
	grace *kernel.Grace
	links []link.Link // of cgroups
}

// lefts has the words for the outcomes of a message or a connection.
var lefts = sync.OnceValue(func() map[uint32]string { return kernel.Words(loadSockets, "so_left", "SO_") })

// Open loads the programs and attaches them to the cgroups. Sockets that are connected already are left alone. If Open
// fails, it leaves nothing behind.
func Open(opts Options) (*Sockets, error) {
	s, err := load(opts)
	if err != nil {
		return nil, err
	}
	for _, cgroup := range opts.Cgroups {
		l, err := kernel.AttachCgroup(s.coll.Programs[socketsProgShSoOps], socketsProgShSoOps, cgroup, ebpf.AttachCGroupSockOps)
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		s.links = append(s.links, l)
	}
	return s, nil
}

// load loads the programs, and lets sh_so_msg see the messages of sockets in the map.
func load(opts Options) (s *Sockets, err error) {
	spec, err := loadSockets()
	if err != nil {
		return nil, fmt.Errorf("read the embedded object: %w", err)
	}
	some := uint8(0)
	if len(opts.Ports) > 0 {
		some = 1
	}
	s = &Sockets{opts: opts}
	if s.coll, err = kernel.Load(spec, map[string]any{socketsVarSomePorts: some}, nil); err != nil {
		return nil, fmt.Errorf("load the programs of socket pairs: %w", err)
	}
	if err := s.prepare(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Sockets) prepare() (err error) {
	if s.grace, err = kernel.NewGrace(); err != nil {
		return err
	}
	var words [socketsSoLimitSO_PORT_WORDS]uint64
	for _, p := range s.opts.Ports {
		for port := int(p.First); port <= int(p.Last); port++ {
			words[port/64] |= 1 << (port % 64)
		}
	}
	for i, word := range words {
		if word != 0 {
			if err := s.coll.Maps[socketsMapShSoPorts].Put(uint32(i), word); err != nil {
				return fmt.Errorf("write the ports for the programs: %w", err)
			}
		}
	}
	if err := s.control(socketsSoControl{Limit: s.opts.Limit}); err != nil {
		return err
	}
	// It is attached to the map before a socket is in it, so it sees every socket's messages. It goes with map and program.
	if _, err := kernel.AttachSockMap(s.coll.Programs[socketsProgShSoMsg], socketsProgShSoMsg, s.coll.Maps[socketsMapShSoSocks], ebpf.AttachSkMsgVerdict); err != nil {
		return err
	}
	if s.opts.Folder == "" {
		return nil
	}
	if err := os.MkdirAll(s.opts.Folder, 0o700); err != nil {
		return fmt.Errorf("make the folder for the pins of socket pairs: %w; is a bpffs mounted there?", err)
	}
	for _, name := range []string{socketsMapShSoControl, socketsMapShSoSocks} {
		if err := s.coll.Maps[name].Pin(filepath.Join(s.opts.Folder, name)); err != nil {
			return fmt.Errorf("pin %s: %w", name, err)
		}
	}
	return nil
}

func (s *Sockets) control(c socketsSoControl) error {
	if err := s.coll.Maps[socketsMapShSoControl].Put(uint32(0), c); err != nil {
		return fmt.Errorf("write the settings of socket pairs: %w", err)
	}
	return nil
}

// Counts returns messages and bytes that were redirected ("taken"), or that went by TCP, by reason; and connections
// that were paired ("joined") or not.
func (s *Sockets) Counts() (map[string]kernel.Count, error) {
	counts := map[string]kernel.Count{}
	for left, name := range lefts() {
		var each []socketsCount
		if err := s.coll.Maps[socketsMapShSoCounts].Lookup(left, &each); err != nil {
			return nil, fmt.Errorf("read the counters of socket pairs: %w", err)
		}
		var sum kernel.Count
		for _, one := range each {
			sum.Packets += one.Packets
			sum.Bytes += one.Bytes
		}
		if sum.Packets > 0 {
			counts[name] = sum
		}
	}
	return counts, nil
}

// IsConnection reports whether a name in Counts belongs to connections, and not to messages.
func IsConnection(name string) bool {
	for number, has := range lefts() {
		if has == name {
			return number >= uint32(socketsSoLeftSO_JOINED)
		}
	}
	return false
}

// seen returns the sockets in the map.
func (s *Sockets) seen() ([]socketsSoSeen, error) {
	return look(s.coll.Programs[socketsProgShSoLook], s.coll.Maps[socketsMapShSoSocks])
}

// Paired returns the number of sockets in the map, and of the bytes that wait at them.
func (s *Sockets) Paired() (sockets int, queued uint64, err error) {
	seen, err := s.seen()
	for _, one := range seen {
		queued += uint64(one.Queued)
	}
	return len(seen), queued, err
}

// look asks the program, which was loaded with the map, for the sockets in it.
func look(program *ebpf.Program, socks *ebpf.Map) (all []socketsSoSeen, err error) {
	const doing = "look at the sockets in a map: %w"
	keys, err := keysOf(socks)
	if err != nil {
		return nil, fmt.Errorf(doing, err)
	}
	for some := range slices.Chunk(keys, int(socketsSoLimitSO_LOOK_MAX)) {
		seen := make([]socketsSoSeen, len(some))
		for i, key := range some {
			seen[i].Key = key
		}
		packet, err := binary.Append(nil, binary.NativeEndian, seen)
		if err != nil {
			return nil, fmt.Errorf(doing, err)
		}
		answer := ebpf.RunOptions{Data: packet, DataOut: make([]byte, len(packet))}
		if _, err := program.Run(&answer); err != nil {
			return nil, fmt.Errorf(doing, err)
		}
		if _, err := binary.Decode(answer.DataOut, binary.NativeEndian, seen); err != nil {
			return nil, fmt.Errorf(doing, err)
		}
		for _, one := range seen {
			if one.At != 0 { // otherwise it has closed meanwhile
				all = append(all, one)
			}
		}
	}
	return all, nil
}

// keysOf returns the keys in a map. If the key that was asked for last has gone, the kernel begins with the first one
// again (sock_hash_get_next_key in net/core/sock_map.c), so keys may come twice.
func keysOf(socks *ebpf.Map) (keys []socketsSoKey, err error) {
	known := map[socketsSoKey]bool{}
	var last any // nil: the first key is next
	for range 4 * SocketsMax {
		var next socketsSoKey
		err := socks.NextKey(last, &next)
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return keys, nil
		}
		if err != nil {
			return nil, err
		}
		if !known[next] {
			known[next] = true
			keys = append(keys, next)
		}
		last = next
	}
	return nil, errors.New("sockets come and go faster than they can be listed")
}

// loadLook loads the program that looks at the sockets in a map of another process.
func loadLook(socks *ebpf.Map) (*ebpf.Program, error) {
	spec, err := loadSockets()
	if err != nil {
		return nil, fmt.Errorf("read the embedded object: %w", err)
	}
	maps.DeleteFunc(spec.Programs, func(name string, _ *ebpf.ProgramSpec) bool { return name != socketsProgShSoLook })
	maps.DeleteFunc(spec.Maps, func(name string, _ *ebpf.MapSpec) bool {
		return name != socketsMapShSoSocks && !strings.HasPrefix(name, ".")
	})
	coll, err := kernel.Load(spec, nil, map[string]*ebpf.Map{socketsMapShSoSocks: socks})
	if err != nil {
		return nil, fmt.Errorf("load the program that looks at socket pairs: %w", err)
	}
	defer coll.Close()
	return kernel.TakeProgram(coll, socketsProgShSoLook)
}

// settle is the time for which the queue of a socket has to be empty, in pass mode, before the socket may leave the
// map: a call that was told to redirect before may still wait for the lock of the other socket.
const settle = 300 * time.Millisecond

// Shut takes the pairs apart without loss: no new ones are made, all data goes by TCP, and a socket leaves the map when
// its queue has been empty for a while. stay is the number of sockets with unread data at the end of patience; these
// sockets stay, and with them the pins. Call Close afterwards.
func (s *Sockets) Shut(patience time.Duration) (stay int, err error) {
	if err := s.control(socketsSoControl{Passing: 1, Limit: s.opts.Limit}); err != nil {
		return 0, err
	}
	for _, l := range s.links {
		err = errors.Join(err, l.Close())
	}
	s.links = nil
	if err = errors.Join(err, s.grace.Wait()); err != nil {
		return 0, err
	}
	stay, err = empty(s.coll.Programs[socketsProgShSoLook], s.coll.Maps[socketsMapShSoSocks], patience)
	if stay == 0 && err == nil && s.opts.Folder != "" {
		err = os.RemoveAll(s.opts.Folder)
	}
	return stay, err
}

// empty takes sockets out of a map in pass mode.
func empty(program *ebpf.Program, socks *ebpf.Map, patience time.Duration) (stay int, err error) {
	since := map[socketsSoKey]time.Time{} // when the queue was first seen empty, and always since
	for end := time.Now().Add(patience); ; time.Sleep(settle / 10) {
		seen, err := look(program, socks)
		if err != nil {
			return 0, err
		}
		stay = 0
		for _, one := range seen {
			begin, ok := since[one.Key]
			switch {
			case one.Queued > 0:
				delete(since, one.Key)
				stay++
			case !ok:
				since[one.Key] = time.Now()
				stay++
			case time.Since(begin) < settle:
				stay++
			default:
				if err := socks.Delete(one.Key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
					return 0, fmt.Errorf("remove a socket from the map: %w", err)
				}
			}
		}
		if stay == 0 || time.Now().After(end) {
			return stay, nil
		}
	}
}

// Left returns the folders, among those below a folder, that Drain has to take apart.
func Left(below string) ([]string, error) {
	pins, err := filepath.Glob(filepath.Join(below, "*", "*", socketsMapShSoSocks))
	if err != nil {
		return nil, fmt.Errorf("look for pairs of sockets of earlier processes: %w", err)
	}
	for i, pin := range pins {
		pins[i] = filepath.Dir(filepath.Dir(pin))
	}
	slices.Sort(pins)
	return slices.Compact(pins), nil
}

// Drain takes apart the pairs that killed processes have left in the folders below a folder, as Shut does. It leaves one folder
// alone: the caller's own.
func Drain(above, but string, patience time.Duration) (stay int, err error) {
	folders, err := filepath.Glob(filepath.Join(above, "*", socketsMapShSoSocks))
	folders = slices.DeleteFunc(folders, func(path string) bool { return filepath.Dir(path) == but })
	if err != nil || len(folders) == 0 {
		return 0, err
	}
	grace, err := kernel.NewGrace()
	if err != nil {
		return 0, err
	}
	var errs []error
	for _, path := range folders {
		more, err := drainOne(filepath.Dir(path), grace, patience)
		stay += more
		errs = append(errs, err)
	}
	return stay, errors.Join(append(errs, grace.Close())...)
}

func drainOne(folder string, grace *kernel.Grace, patience time.Duration) (stay int, err error) {
	control, err := kernel.OpenMap(filepath.Join(folder, socketsMapShSoControl))
	if err != nil {
		return 0, err
	}
	defer control.Close() //nolint:errcheck // written before
	socks, err := kernel.OpenMap(filepath.Join(folder, socketsMapShSoSocks))
	if err != nil {
		return 0, err
	}
	defer socks.Close() //nolint:errcheck // only looked at
	program, err := loadLook(socks)
	if err != nil {
		return 0, err
	}
	defer program.Close() //nolint:errcheck // it is attached nowhere
	if err := control.Put(uint32(0), socketsSoControl{Passing: 1}); err != nil {
		return 0, fmt.Errorf("make the socket pairs of %s send by TCP: %w", folder, err)
	}
	if err := grace.Wait(); err != nil {
		return 0, err
	}
	if stay, err = empty(program, socks, patience); stay == 0 && err == nil {
		err = os.RemoveAll(folder)
	}
	return stay, err
}

// Close closes programs and maps. Pairs that Shut has not taken apart go on.
func (s *Sockets) Close() error {
	var errs []error
	for _, l := range s.links {
		errs = append(errs, l.Close())
	}
	if s.grace != nil {
		errs = append(errs, s.grace.Close())
	}
	s.coll.Close()
	return errors.Join(errs...)
}
