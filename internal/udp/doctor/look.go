package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"github.com/safchain/ethtool"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Look reads the facts of an interface of the calling thread's network namespace. root is the folder with sys and proc: "/"
// except in tests. It changes nothing, and needs rights only to see the XDP program.
func Look(root, iface string) (Facts, error) {
	dev, err := netlink.LinkByName(iface)
	if err != nil {
		return Facts{}, fmt.Errorf("look at interface %s: %w; `ip link` lists the interfaces", iface, err)
	}
	attrs := dev.Attrs()
	f := Facts{Interface: iface, MTU: attrs.MTU, Hash: map[string]uint64{}}
	if f.Queues, err = kernel.ReceiveQueues(attrs); err != nil {
		return Facts{}, err
	}
	if attrs.Xdp != nil && attrs.Xdp.Attached {
		f.Program, f.Own = strconv.Itoa(int(attrs.Xdp.ProgId)), ownAt(iface)
	}
	f.ask(attrs.Index)
	f.machine(root)
	f.uncompared()
	return f, nil
}

// ownAt names shunt's program on an interface; "": there is none, or that is not known.
func ownAt(iface string) string {
	o, err := kernel.OccupantOf(iface)
	if err != nil || o == nil || !o.IsOurs() {
		return ""
	}
	if instance, balances := o.Instance(); balances {
		return fmt.Sprintf("the program of shunt's balancer, instance %s", instance)
	}
	return "the program of shunt's UDP path"
}

// ask asks the driver.
func (f *Facts) ask(index int) {
	unknown := func(what string, err error) {
		if err != nil {
			f.Unknown = append(f.Unknown, fmt.Sprintf("%s: %v", what, err))
		}
	}
	tool, err := ethtool.NewEthtool()
	if err != nil {
		unknown("the driver", err)
	} else {
		defer tool.Close()
		f.Driver, err = tool.DriverName(f.Interface)
		unknown("the driver's name", err)
		f.Features, err = tool.Features(f.Interface)
		unknown("the driver's features", err)
	}
	f.XDP, err = xdpFeatures(index)
	unknown("the driver's modes of XDP", err)
	for flow, number := range map[string]uint32{"udp4": 2, "udp6": 6} { // UDP_V4_FLOW, UDP_V6_FLOW (linux/ethtool.h)
		if bits, err := hashOf(f.Interface, number); err == nil {
			f.Hash[flow] = bits
		} else if !errors.Is(err, unix.EOPNOTSUPP) { // EOPNOTSUPP: the driver has no queues to spread over
			unknown("the hash of "+flow, err)
		}
	}
}

// header is struct genlmsghdr: command, version and two bytes that must be zero, and that nl.Genlmsg does not clear.
type header [4]byte

func (h header) Len() int          { return len(h) }
func (h header) Serialize() []byte { return h[:] }

// xdpFeatures returns the driver's abilities, which the kernel's netlink family "netdev" reports since Linux 6.3; nil: it does not.
func xdpFeatures(index int) (*uint64, error) {
	const cmdDevGet, attrIfindex, attrFeatures = 1, 1, 3 // linux/netdev.h
	family, err := netlink.GenlFamilyGet("netdev")
	if errors.Is(err, unix.ENOENT) {
		return nil, errors.New("this kernel does not report them; Linux 6.3 and later do")
	}
	if err != nil {
		return nil, err
	}
	request := nl.NewNetlinkRequest(int(family.ID), 0)
	request.AddData(header{cmdDevGet, 1})
	request.AddData(nl.NewRtAttr(attrIfindex, nl.Uint32Attr(uint32(index))))
	answers, err := request.Execute(unix.NETLINK_GENERIC, 0)
	if err != nil {
		return nil, err
	}
	for _, answer := range answers {
		parts, err := nl.ParseRouteAttr(answer[nl.SizeofGenlmsg:])
		if err != nil {
			return nil, err
		}
		for _, p := range parts {
			if p.Attr.Type == attrFeatures && len(p.Value) == 8 {
				bits := nl.NativeEndian().Uint64(p.Value)
				return &bits, nil
			}
		}
	}
	return nil, errors.New("the kernel's answer has none")
}

// rxnfc is the beginning of struct ethtool_rxnfc (linux/ethtool.h), with the length that the kernel expects for ETHTOOL_GRXFH.
type rxnfc struct {
	cmd, flow uint32
	data      uint64
	rest      [176]byte
}

// hashOf returns the fields of a kind of flow that choose its queue.
func hashOf(iface string, flow uint32) (uint64, error) {
	const getHash = 0x29 // ETHTOOL_GRXFH
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	ask := rxnfc{cmd: getHash, flow: flow}
	request := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		rest [16]byte
	}{data: unsafe.Pointer(&ask)}
	copy(request.name[:unix.IFNAMSIZ-1], iface)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return 0, errno
	}
	return ask.data, nil
}

// machine reads /sys and /proc.
func (f *Facts) machine(root string) {
	read := func(path string) string {
		text, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(text))
	}
	if online, err := kernel.ParseCPUs(read("sys/devices/system/cpu/online")); err == nil {
		f.CPUs = len(online)
	}
	f.Isolated = read("sys/devices/system/cpu/isolated")
	f.Governors = map[string]int{}
	paths, _ := filepath.Glob(filepath.Join(root, "sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")) // the pattern is right
	for _, path := range paths {
		if text, err := os.ReadFile(path); err == nil {
			f.Governors[strings.TrimSpace(string(text))]++
		}
	}
	own := f.device(root, read)
	for line := range strings.Lines(read("proc/interrupts")) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		name := fields[len(fields)-1]
		number, err := strconv.Atoi(strings.TrimSuffix(fields[0], ":"))
		named := name == f.Interface || strings.HasPrefix(name, f.Interface+"-") || strings.Contains(name, "-"+f.Interface+"-")
		if err != nil || !named && !(own[number] && queueOf(name) >= 0) {
			continue
		}
		folder := fmt.Sprintf("proc/irq/%d/", number)
		if where := cmp.Or(read(folder+"effective_affinity_list"), read(folder+"smp_affinity_list")); where != "" {
			f.Interrupts = append(f.Interrupts, Interrupt{number, name, where, queueOf(name)})
		}
	}
}
