// Package sock serves services at the socket: when a socket connects to a VIP, programs at the hooks of a
// cgroup give it the address of a backend, so that no packet has to be changed. The programs read the
// maps of the data plane, and write to none of them.
//
//	/sys/fs/bpf/shunt/<instance>/sockets/
//	    connect4 …          the links, one for each hook, replaced in place
//	    sh_sk_choices       the backends that each socket has been given
//	    sh_sk_clients       which backends clients of affinity stay with
//	    sh_sk_outcomes      counters
//
// After a kill, all of this goes on to work. Open adopts it. Remove, which needs no running process,
// removes it, and so does the removal of the instance's data plane.
//
// Needs CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON.
package sock

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/host"
	"github.com/shunt-lb/shunt/internal/kernel"
)

// directory is the folder of the pins, in the instance's.
const directory = "sockets"

// DataPlane has the maps that the programs read. *datapath.Datapath is one.
type DataPlane interface {
	// LoadBeside loads an object onto the data plane's maps, and maps of its own.
	LoadBeside(load func() (*ebpf.CollectionSpec, error), own map[string]*ebpf.Map) (*ebpf.Collection, error)
}

// Options say whose sockets are served, and by which data plane.
type Options struct {
	Instance  string
	Cgroup    string // path of a folder of a cgroup2 file system: sockets of its processes, and of those in folders below
	DataPlane DataPlane
	PinRoot   string       // a bpffs; kernel.DefaultPinRoot if empty
	Log       *slog.Logger // slog.Default() if nil
}

// hook is one hook of a cgroup, and its program.
type hook struct {
	program string
	pin     string
	attach  ebpf.AttachType
}

// hooks are in the order of their attachment: hooks that translate back to the VIP come before hooks that send
// to a backend, so that no answer comes from an unknown address.
var hooks = []hook{
	{sockProgShPeername4, "getpeername4", ebpf.AttachCgroupInet4GetPeername},
	{sockProgShPeername6, "getpeername6", ebpf.AttachCgroupInet6GetPeername},
	{sockProgShRecvmsg4, "recvmsg4", ebpf.AttachCGroupUDP4Recvmsg},
	{sockProgShRecvmsg6, "recvmsg6", ebpf.AttachCGroupUDP6Recvmsg},
	{sockProgShSendmsg4, "sendmsg4", ebpf.AttachCGroupUDP4Sendmsg},
	{sockProgShSendmsg6, "sendmsg6", ebpf.AttachCGroupUDP6Sendmsg},
	{sockProgShConnect4, "connect4", ebpf.AttachCGroupInet4Connect},
	{sockProgShConnect6, "connect6", ebpf.AttachCGroupInet6Connect},
	{sockProgShBind4, "bind4", ebpf.AttachCGroupInet4Bind},
	{sockProgShBind6, "bind6", ebpf.AttachCGroupInet6Bind},
}

// Sockets are the programs at a cgroup. Methods may be called from any goroutine, but Detach and
// Close once, and last.
type Sockets struct {
	opts   Options
	maps   map[string]*ebpf.Map
	links  []link.Link
	closer closer
}

func folder(root, instance string) string {
	return filepath.Join(kernel.Directory(root, instance), directory)
}

func (o *Options) complete() error {
	if o.PinRoot == "" {
		o.PinRoot = kernel.DefaultPinRoot
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return kernel.CheckName(o.Instance)
}

// CheckCgroup returns the reason why a path cannot be the cgroup of Options; nil if it can.
func CheckCgroup(path string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return fmt.Errorf("look at the cgroup %s: %w; `find /sys/fs/cgroup -maxdepth 2 -type d` lists cgroups", path, err)
	}
	if fs.Type != unix.CGROUP2_SUPER_MAGIC {
		return fmt.Errorf("serve the sockets of the cgroup %s: the path is in no cgroup2 file system; `findmnt -t cgroup2` says where one is mounted", path)
	}
	return nil
}

// Open serves the sockets of a cgroup. Programs of an earlier process are replaced in place, without a moment
// in which there is none. After a failure nothing new is left behind, and earlier programs continue.
func Open(opts Options) (*Sockets, error) {
	if err := opts.complete(); err != nil {
		return nil, err
	}
	if err := CheckCgroup(opts.Cgroup); err != nil {
		return nil, err
	}
	s := &Sockets{opts: opts, maps: map[string]*ebpf.Map{}}
	fresh, err := s.openMaps()
	if err == nil {
		err = s.attach()
	}
	if err == nil {
		s.closer, err = loadCloser(opts.DataPlane, s.maps)
	}
	if err == nil {
		return s, nil
	}
	err = fmt.Errorf("serve the sockets of the cgroup %s: %w", opts.Cgroup, err)
	if fresh {
		return nil, errors.Join(err, s.Detach())
	}
	return nil, errors.Join(err, s.Close())
}

// openMaps takes the pinned maps over, or makes them. fresh reports whether no link was pinned, so that there
// is nothing to leave in place.
func (s *Sockets) openMaps() (fresh bool, err error) {
	spec, err := loadSock()
	if err != nil {
		return false, fmt.Errorf("read the embedded object: %w", err)
	}
	own := &ebpf.CollectionSpec{Maps: map[string]*ebpf.MapSpec{}}
	for _, name := range []string{sockMapShSkChoices, sockMapShSkClients, sockMapShSkOutcomes} {
		own.Maps[name] = spec.Maps[name]
	}
	dir := folder(s.opts.PinRoot, s.opts.Instance)
	set, err := kernel.NewMapSet(own, dir, nil, "run `shunt detach` first")
	if err != nil {
		return false, err
	}
	if err := set.MakeDirectory(); err != nil {
		return false, err
	}
	_, err = os.Stat(filepath.Join(dir, hooks[0].pin))
	fresh = errors.Is(err, os.ErrNotExist)
	for _, name := range set.Names() {
		if s.maps[name], err = s.openMap(set, name); err != nil {
			delete(s.maps, name)
			return fresh, err
		}
	}
	return fresh, nil
}

// openMap takes one map over. A map with another layout is dropped: earlier sockets keep their backends, and
// see their addresses.
func (s *Sockets) openMap(set *kernel.MapSet, name string) (*ebpf.Map, error) {
	m, err := kernel.OpenMap(set.Path(name))
	if errors.Is(err, os.ErrNotExist) {
		return set.Make(name)
	}
	if err != nil {
		return nil, err
	}
	different := set.Check(m, name, set.Path(name))
	if different == nil {
		return m, nil
	}
	s.opts.Log.Warn("cannot read the backends that sockets got before this version started: these sockets go on, see their backend as peer, and are not closed when it goes", "map", name)
	if err := errors.Join(m.Unpin(), m.Close()); err != nil {
		return nil, fmt.Errorf("remove the map of another version pinned at %s: %w", set.Path(name), err)
	}
	return set.Make(name)
}

// attach loads the programs and puts each into its hook.
func (s *Sockets) attach() error {
	cookie, err := host.NetnsCookie()
	if err != nil {
		return err
	}
	load := func() (*ebpf.CollectionSpec, error) {
		spec, err := loadSock()
		if err == nil {
			err = spec.Variables[sockVarHostNetns].Set(cookie)
		}
		return spec, err
	}
	coll, err := s.opts.DataPlane.LoadBeside(load, s.maps)
	if err != nil {
		return fmt.Errorf("load the programs: %w", err)
	}
	defer coll.Close()
	for _, h := range hooks {
		path := filepath.Join(folder(s.opts.PinRoot, s.opts.Instance), h.pin)
		l, err := kernel.PinCgroup(coll.Programs[h.program], h.program, s.opts.Cgroup, h.attach, path)
		if err != nil {
			return err
		}
		s.links = append(s.links, l)
	}
	return nil
}

// outcomeNames are the words of all outcomes, without OUTCOME_NONE, which is no outcome.
var outcomeNames = sync.OnceValue(func() map[uint32]string {
	names := kernel.Words(loadSock, "sock_outcome", "OUTCOME_")
	delete(names, uint32(sockSockOutcomeOUTCOME_NONE))
	return names
})

// OutcomeNames are all names that Outcomes may have, in order.
func OutcomeNames() []string {
	var all []string
	for _, number := range slices.Sorted(maps.Keys(outcomeNames())) {
		all = append(all, outcomeNames()[number])
	}
	return all
}

// Outcomes count the calls of sockets by outcome, without the zeros. They outlive the
// process.
func (s *Sockets) Outcomes() (map[string]uint64, error) { return outcomes(s.maps[sockMapShSkOutcomes]) }

// PinnedOutcomes returns the Outcomes of an instance, whether its process runs or not; nil if its sockets are
// not served.
func PinnedOutcomes(root, instance string) (map[string]uint64, error) {
	if root == "" {
		root = kernel.DefaultPinRoot
	}
	m, err := kernel.OpenMap(filepath.Join(folder(root, instance), sockMapShSkOutcomes))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer m.Close()
	return outcomes(m)
}

func outcomes(m *ebpf.Map) (map[string]uint64, error) {
	counts := map[string]uint64{}
	for number, name := range outcomeNames() {
		var each []uint64
		if err := m.Lookup(number, &each); err != nil {
			return counts, fmt.Errorf("read the counter of %s: %w", name, err)
		}
		for _, one := range each {
			counts[name] += one
		}
		if counts[name] == 0 {
			delete(counts, name)
		}
	}
	return counts, nil
}

// Close closes the programs, which stay attached.
func (s *Sockets) Close() error {
	var errs []error
	for _, l := range s.links {
		errs = append(errs, l.Close())
	}
	s.links = nil
	errs = append(errs, s.closer.close())
	kernel.CloseMaps(s.maps)
	return errors.Join(errs...)
}

// Detach detaches the programs. Sockets that have a backend keep it.
func (s *Sockets) Detach() error {
	err := s.Close()
	return errors.Join(err, Remove(s.opts.PinRoot, s.opts.Instance))
}

// Remove detaches the programs of an instance that an earlier process has left. It succeeds if there are none.
func Remove(root, instance string) error {
	if root == "" {
		root = kernel.DefaultPinRoot
	}
	dir := folder(root, instance)
	for i := len(hooks) - 1; i >= 0; i-- {
		path := filepath.Join(dir, hooks[i].pin)
		if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err := kernel.RemoveLink(path); err != nil {
			return fmt.Errorf("detach the program pinned at %s: %w", path, err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove the maps in %s: %w", dir, err)
	}
	return nil
}
