// Package decap is the backend's half of direct return: a program that decapsulates IPIP and GUE, and `shunt
// decap`, which attaches it and keeps the machine from announcing its VIPs.
package decap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// directory holds the pinned links of sh_decap. No instance has such a name.
const directory = "_decap"

// Options say which packets a backend decapsulates, and where.
type Options struct {
	// Name is that of the pinned link, [A-Za-z0-9-]: one per network namespace.
	Name      string
	Interface string
	Mode      model.Attach
	VIPs      []netip.Addr   // inner destinations
	Senders   []netip.Prefix // permitted outer sources
	GUEPort   uint16         // UDP, host byte order; 0: GUE is not taken off
	PinRoot   string         // a bpffs; kernel.DefaultPinRoot if empty
	Log       *slog.Logger   // slog.Default() if nil
}

// Program is sh_decap on an interface. Its link is pinned: the program outlives the process,
// and the next Attach of that name replaces it in one step. Methods may be called at
// any time, but Detach and Close once, and last.
type Program struct {
	kernel.Attachment
	ifindex int
	objects *ebpf.Collection
	program *ebpf.Program
	link    link.Link
	root    string
	held    map[netip.Addr]bool // addresses in sh_dc_locals
}

func pinPath(root, name string) string { return filepath.Join(kernel.Directory(root, directory), name) }

// Attach loads the program, fills its maps, and attaches it: it replaces a program that an earlier process left
// under the same name, or attaches anew. auto tries native mode first. The interface is in the calling thread's
// network namespace. After a failure nothing is left behind, and a predecessor's program stays.
func Attach(opts Options) (*Program, error) {
	if opts.PinRoot == "" {
		opts.PinRoot = kernel.DefaultPinRoot
	}
	if opts.Log == nil {
		opts.Log = slog.Default()
	}
	if err := kernel.CheckName(opts.Name); err != nil {
		return nil, err
	}
	dev, err := netlink.LinkByName(opts.Interface)
	if err != nil {
		return nil, fmt.Errorf("attach to interface %s: %w; `ip link` lists the interfaces", opts.Interface, err)
	}
	if len(dev.Attrs().HardwareAddr) != 6 {
		return nil, fmt.Errorf("attach to interface %s: it is not an Ethernet interface; shunt decapsulates Ethernet frames only", opts.Interface)
	}
	if err := kernel.Mount(opts.PinRoot, opts.Log); err != nil {
		return nil, err
	}
	d := &Program{Attachment: kernel.Attachment{Interface: opts.Interface}, ifindex: dev.Attrs().Index, root: opts.PinRoot, held: map[netip.Addr]bool{}}
	if err := d.load(opts, nil); err != nil {
		return nil, err
	}
	path := pinPath(opts.PinRoot, opts.Name)
	taken, err := d.takeOver(path, dev, opts.Mode)
	if err == nil && !taken {
		err = d.attachNew(path, opts.Mode)
	}
	if err != nil {
		d.objects.Close()
		removeDirectory(opts.PinRoot)
		return nil, err
	}
	return d, nil
}

// balancer is the balancer whose program calls this one.
type balancer struct {
	shared    map[string]*ebpf.Map // its maps
	tunnelled uint32               // index of the program that gets decapsulated packets, or noIndex
}

// noIndex is INTERFACE_ANY of bpf/lb/types.h: the stack gets decapsulated packets.
const noIndex = ^uint32(0)

// clusterMax is the number of inner destinations, and of senders, for a node of a cluster: far more than a cluster has nodes, and as
// many addresses as services can have. The maps take memory as needed.
const clusterMax = 1 << 16

// load makes program and maps, and fills the maps, so that the program is complete before it
// sees a packet. behind is nil if no balancer's program calls this one.
func (d *Program) load(opts Options, behind *balancer) error {
	spec, err := loadDecap()
	if err != nil {
		return fmt.Errorf("read the embedded object: %w", err)
	}
	constants, shared := map[string]any{decapVarGuePort: kernel.ToWire(opts.GUEPort)}, map[string]*ebpf.Map(nil)
	if behind != nil {
		constants[decapVarBehindBalancer], constants[decapVarTunnelledIndex], shared = uint8(1), behind.tunnelled, behind.shared
		if behind.tunnelled != noIndex {
			spec.Maps[decapMapShDcVips].Flags |= unix.BPF_F_NO_PREALLOC
			spec.Maps[decapMapShDcVips].MaxEntries, spec.Maps[decapMapShDcSenders].MaxEntries = clusterMax, clusterMax
		}
	}
	if d.objects, err = kernel.Load(spec, constants, shared); err != nil {
		return fmt.Errorf("load the program that decapsulates: %w", err)
	}
	d.program = d.objects.Programs[decapProgShDecap]
	for _, vip := range opts.VIPs {
		if err == nil {
			err = d.put(decapMapShDcVips, toAddr(vip), "VIP "+vip.String())
		}
	}
	for _, p := range opts.Senders {
		if err == nil {
			err = d.put(decapMapShDcSenders, toSender(p), "permitted sender "+p.String())
		}
	}
	if err == nil {
		err = d.Refresh()
	}
	if err != nil {
		d.objects.Close()
		d.program = nil
	}
	return err
}

func (d *Program) put(name string, key any, what string) error {
	if err := d.objects.Maps[name].Put(key, uint32(1)); err != nil {
		return fmt.Errorf("write %s into %s, which has room for %d: %w", what, name, d.objects.Maps[name].MaxEntries(), err)
	}
	return nil
}

// remove undoes put. It succeeds if there is nothing to undo.
func (d *Program) remove(name string, key any, what string) error {
	if err := d.objects.Maps[name].Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("remove %s from %s: %w", what, name, err)
	}
	return nil
}

// toSender makes a key of sh_dc_senders; an IPv4 prefix lies under ::ffff:0:0/96.
func toSender(p netip.Prefix) decapSenderKey {
	p = p.Masked()
	bits := p.Bits()
	if p.Addr().Is4() {
		bits += 96
	}
	key := decapSenderKey{PrefixLength: uint32(bits)}
	b := p.Addr().As16()
	for i := range key.Address {
		key.Address[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return key
}

// Refresh lets tunnels end at the present addresses of the interface.
func (d *Program) Refresh() error {
	dev, err := netlink.LinkByIndex(d.ifindex)
	if err != nil {
		return fmt.Errorf("read the addresses of interface %s: %w", d.Interface, err)
	}
	list, err := netlink.AddrList(dev, netlink.FAMILY_ALL)
	if err != nil {
		return fmt.Errorf("read the addresses of interface %s: %w", d.Interface, err)
	}
	now := map[netip.Addr]bool{}
	for _, a := range list {
		address, ok := netip.AddrFromSlice(a.IP)
		if !ok {
			continue
		}
		address = address.Unmap()
		now[address] = true
		if !d.held[address] {
			if err := d.put(decapMapShDcLocals, toAddr(address), "the interface's address "+address.String()); err != nil {
				return err
			}
			d.held[address] = true
		}
	}
	for address := range d.held {
		if now[address] {
			continue
		}
		if err := d.objects.Maps[decapMapShDcLocals].Delete(toAddr(address)); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("remove the address %s, which interface %s no longer has, from %s: %w", address, d.Interface, decapMapShDcLocals, err)
		}
		delete(d.held, address)
	}
	return nil
}

// takeOver puts the program into the link that is pinned at path. It returns false if there is no usable link;
// an unusable pin has then been removed.
func (d *Program) takeOver(path string, dev netlink.Link, mode model.Attach) (bool, error) {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("open the link pinned at %s: %w; remove the file, which detaches it", path, err)
	}
	info, err := l.Info()
	current := kernel.ModeOf(dev)
	if err != nil || info.XDP() == nil || int(info.XDP().Ifindex) != d.ifindex || current == "" ||
		mode != model.AttachAuto && string(mode) != string(current) {
		return false, kernel.DropLink(l)
	}
	if err := l.Update(d.program); err != nil {
		return false, errors.Join(fmt.Errorf("replace the program on interface %s: %w", d.Interface, err), l.Close())
	}
	d.link, d.Mode = l, current
	if current == kernel.ModeGeneric && mode == model.AttachAuto {
		d.Reason = "it was attached in generic mode before this start, and native mode was not tried"
	}
	return true, nil
}

// attachNew makes a new link and pins it.
func (d *Program) attachNew(path string, mode model.Attach) error {
	err := kernel.Occupied(d.Interface, "")
	if err != nil {
		return err
	}
	d.Reason, err = kernel.InMode(d.Interface, kernel.Mode(mode), "auto, native or generic", func(m kernel.Mode) (err error) {
		d.Mode = m
		d.link, err = kernel.AttachXDP(d.program, d.Interface, d.ifindex, m, "")
		return err
	})
	if err != nil {
		return err
	}
	const tries = 10 // another namespace's last link may take the folder away in between
	for range tries {
		if err = os.MkdirAll(filepath.Dir(path), 0o700); err == nil {
			err = d.link.Pin(path)
		}
		if !errors.Is(err, os.ErrNotExist) {
			break
		}
	}
	if err != nil {
		return errors.Join(fmt.Errorf("pin the link at %s: %w", path, err), d.link.Close())
	}
	return nil
}

// Counters returns packets and bytes by the reason's name, since the program was loaded, without zeros.
func (d *Program) Counters() (map[string]kernel.Count, error) {
	return kernel.ReasonCounts(d.objects.Maps[decapMapShDcReasons])
}

// RunPacket runs the program on a frame as if it had come in by the interface, and returns
// XDP's verdict and the frame afterwards. It counts; nothing reaches the stack. The
// interface must be in the calling thread's network namespace.
func (d *Program) RunPacket(frame []byte) (verdict uint32, out []byte, err error) {
	return kernel.RunXDP(d.program, d.Interface, d.ifindex, frame)
}

// Close closes the program, which stays attached.
func (d *Program) Close() error {
	err := d.link.Close()
	d.objects.Close()
	return err
}

// Detach detaches the program and removes its pin.
func (d *Program) Detach() error {
	err := kernel.DropLink(d.link)
	d.objects.Close()
	removeDirectory(d.root)
	if err != nil {
		return fmt.Errorf("detach the program from interface %s: %w", d.Interface, err)
	}
	return nil
}

// The folders are removed with their last link.
func removeDirectory(root string) {
	_ = os.Remove(kernel.Directory(root, directory))
	_ = os.Remove(kernel.Home(root))
}

// Remove detaches the program that a process that is gone has left under a name. It succeeds if there is none.
func Remove(root, name string) error {
	if root == "" {
		root = kernel.DefaultPinRoot
	}
	path := pinPath(root, name)
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err := kernel.RemoveLink(path); err != nil {
		return fmt.Errorf("detach the program pinned at %s: %w", path, err)
	}
	removeDirectory(root)
	return nil
}

// On reports whether sh_decap is on an interface, from any process. It needs CAP_SYS_ADMIN to read the
// program's name.
func On(iface string) (bool, error) {
	dev, err := netlink.LinkByName(iface)
	if err != nil {
		return false, fmt.Errorf("look for a program on interface %s: %w", iface, err)
	}
	if dev.Attrs().Xdp == nil || !dev.Attrs().Xdp.Attached {
		return false, nil
	}
	p, err := ebpf.NewProgramFromID(ebpf.ProgramID(dev.Attrs().Xdp.ProgId))
	if errors.Is(err, os.ErrNotExist) {
		return false, nil // it went in this moment
	}
	if err != nil {
		return false, fmt.Errorf("look at the program on interface %s: %w; run as root", iface, err)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return false, fmt.Errorf("look at the program on interface %s: %w", iface, err)
	}
	return info.Name == decapProgShDecap, nil
}

// Pinned lists the programs that `shunt decap` has pinned: paths, by network namespace.
func Pinned() (map[string]string, error) {
	_, _ = kernel.SharePins()
	dir := kernel.Directory(kernel.DefaultPinRoot, directory)
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list the pins in %s: %w", dir, err)
	}
	all := map[string]string{}
	for _, e := range entries {
		all[e.Name()] = filepath.Join(dir, e.Name())
	}
	return all, nil
}

func toAddr(a netip.Addr) (to decapAddr) {
	to.High, to.Low = kernel.AddrWords(a)
	return to
}
