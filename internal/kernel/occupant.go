package kernel

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Occupant is an XDP program on an interface, with the kernel's information about it.
type Occupant struct {
	Interface string    `json:"interface"` // the interface that has it: the one asked about, or one above that
	Mode      Mode      `json:"mode"`
	ID        uint32    `json:"id"`
	Name      string    `json:"name"` // at most 15 characters; empty: it has none, or Unread
	Tag       string    `json:"tag"`  // hash of its instructions
	Loaded    time.Time `json:"loaded"`
	UID       uint32    `json:"uid"` // of the user who loaded it
	// Link is the bpf_link that attaches it; 0: it was attached over netlink, and stays until it is detached.
	Link uint32 `json:"link"`
	// Pins are the files of bpffs that keep the link, and with it the program, attached.
	Pins []string `json:"pins"`
	// Holders are the processes that have the link open or, without one, the program.
	Holders []Holder `json:"holders"`
	// Unread is the reason why only ID and Mode are known.
	Unread error `json:"-"`
}

// Holder is a process that has a program or link open.
type Holder struct {
	PID  int    `json:"pid"`
	Name string `json:"name"` // as /proc/PID/comm has it
}

func (h Holder) String() string { return fmt.Sprintf("process %d (%s)", h.PID, h.Name) }

// products are the XDP programs of shunt other than a balancer's, each with the instruction that detaches it.
var products = map[string]string{
	"sh_decap": "stop `shunt decap`, which decapsulates here: a balancer and a backend need different interfaces",
	guestName:  "let one `shunt run` do both, with `udp` and `interfaces` in one file; or stop the daemon that has the UDP path here",
}

// guestName is a program that goes behind a balancer's of its process (Guest).
const guestName = "sh_udp"

// modeOffloaded is a program in the network card, which shunt never asks for.
const modeOffloaded Mode = "offloaded"

// pinsLookedAt limits the search of bpffs for pins.
const pinsLookedAt = 10000

// OccupantOf finds the XDP program that keeps others off an interface of the calling thread's network namespace: the
// interface's own, or that of a bond or bridge above it, which the kernel refuses as well (dev_xdp_attach in
// net/core/dev.c). nil if there is none. Without CAP_SYS_ADMIN it knows little, and Unread has the reason.
func OccupantOf(iface string) (*Occupant, error) {
	dev, err := netlink.LinkByName(iface)
	if err != nil {
		return nil, fmt.Errorf("look for an XDP program on interface %s: %w", iface, err)
	}
	const above = 8 // as many as the kernel allows on top of each other (MAX_NEST_DEV)
	for range above {
		if xdp := dev.Attrs().Xdp; xdp != nil && xdp.Attached {
			o := &Occupant{Interface: dev.Attrs().Name, Mode: ModeOf(dev), ID: xdp.ProgId}
			if xdp.AttachMode == nl.XDP_ATTACHED_HW {
				o.Mode = modeOffloaded
			}
			o.Unread = o.read(dev.Attrs().Index)
			return o, nil
		}
		if dev.Attrs().MasterIndex == 0 {
			return nil, nil
		}
		if dev, err = netlink.LinkByIndex(dev.Attrs().MasterIndex); err != nil {
			return nil, nil //nolint:nilerr // it is in another namespace, or went in this moment
		}
	}
	return nil, nil
}

// read asks the kernel about the program, and about the objects that keep it attached.
func (o *Occupant) read(ifindex int) error {
	p, err := ebpf.NewProgramFromID(ebpf.ProgramID(o.ID))
	if err != nil {
		return fmt.Errorf("open program %d: %w", o.ID, err)
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return fmt.Errorf("look at program %d: %w", o.ID, err)
	}
	o.Name, o.Tag = info.Name, info.Tag
	o.UID, _ = info.CreatedByUID()
	if since, ok := info.LoadTime(); ok {
		var now unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err == nil {
			o.Loaded = time.Now().Add(since - time.Duration(now.Nano())).Round(time.Second)
		}
	}
	o.Link = xdpLink(o.ID, ifindex)
	key, id := "prog_id:", o.ID
	if o.Link != 0 {
		key, id = "link_id:", o.Link
		o.Pins = pinsOf(DefaultPinRoot, o.Link)
	}
	o.Holders = holders(key, id)
	return nil
}

// xdpLink finds the link that attaches a program; 0 if there is none.
func xdpLink(program uint32, ifindex int) uint32 {
	all := new(link.Iterator)
	defer all.Close()
	for all.Next() {
		info, err := all.Link.Info()
		if err != nil || uint32(info.Program) != program || info.XDP() == nil {
			continue
		}
		if int(info.XDP().Ifindex) == ifindex {
			return uint32(info.ID)
		}
	}
	return 0
}

// pinsOf finds the files that keep a link.
func pinsOf(root string, id uint32) (paths []string) {
	seen := 0
	_ = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return nil
		}
		if seen++; seen > pinsLookedAt {
			return fs.SkipAll
		}
		l, err := link.LoadPinnedLink(path, nil) // the kernel opens no link for reading alone
		if err != nil {
			return nil //nolint:nilerr // a map, a program, or removed by now
		}
		defer l.Close()
		if info, err := l.Info(); err == nil && uint32(info.ID) == id {
			paths = append(paths, path)
		}
		return nil
	})
	return paths
}

// holders returns the processes, except this one, with a file whose fdinfo has this line (bpf_prog_show_fdinfo
// and bpf_link_show_fdinfo in kernel/bpf/syscall.c).
func holders(key string, id uint32) (found []Holder) {
	line := key + "\t" + strconv.FormatUint(uint64(id), 10)
	files, _ := filepath.Glob("/proc/[0-9]*/fdinfo/*")
	for _, file := range files {
		pid, err := strconv.Atoi(strings.Split(file, "/")[2])
		if err != nil || pid == os.Getpid() || slices.ContainsFunc(found, func(h Holder) bool { return h.PID == pid }) {
			continue
		}
		if hasLine(file, line) {
			name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
			found = append(found, Holder{pid, strings.TrimSpace(string(name))})
		}
	}
	return found
}

func hasLine(path, line string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close() //nolint:errcheck // nothing was written
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if lines.Text() == line {
			return true
		}
	}
	return false
}

// String describes the program, the user who loaded it, and the objects that keep it attached, for readers who
// do not know shunt.
func (o *Occupant) String() string {
	if o.Unread != nil {
		text := fmt.Sprintf("program %d on %s, in %s mode; its other properties are unknown: %v", o.ID, o.Interface, o.Mode, o.Unread)
		if errors.Is(o.Unread, unix.EPERM) {
			text += "; run as root"
		}
		return text
	}
	name := strconv.Quote(o.Name)
	if o.Name == "" {
		name = "one without a name"
	}
	text := fmt.Sprintf("%s (program %d, tag %s) on %s, in %s mode", name, o.ID, o.Tag, o.Interface, o.Mode)
	who := fmt.Sprintf("uid %d", o.UID)
	if u, err := user.LookupId(strconv.Itoa(int(o.UID))); err == nil {
		who += " (" + u.Username + ")"
	}
	text += ", loaded by " + who
	if !o.Loaded.IsZero() {
		text += " at " + o.Loaded.Format(time.DateTime)
	}
	if o.Link == 0 {
		text += "; attached over netlink, so it stays until it is detached"
		if len(o.Holders) > 0 {
			text += "; open in " + processes(o.Holders)
		}
		return text
	}
	var keeps []string
	if len(o.Holders) > 0 {
		keeps = append(keeps, processes(o.Holders))
	}
	for _, pin := range o.Pins {
		keeps = append(keeps, "the file "+pin)
	}
	text += fmt.Sprintf("; attached by bpf_link %d", o.Link)
	if len(keeps) == 0 {
		return text + ", and shunt cannot see the process or file that keeps it"
	}
	return text + ", kept by " + strings.Join(keeps, " and ")
}

func processes(holders []Holder) string {
	var all []string
	for _, h := range holders {
		all = append(all, h.String())
	}
	return strings.Join(all, ", ")
}

// Instance returns the instance of a balancer of shunt's: the name for --instance.
func (o *Occupant) Instance() (instance string, ok bool) {
	for _, pin := range o.Pins {
		below, ours := strings.CutPrefix(pin, Home(DefaultPinRoot)+"/")
		parts := strings.Split(below, "/")
		if ours && len(parts) == 2 && CheckName(parts[0]) == nil && strings.HasPrefix(parts[1], LinkPrefix) {
			return parts[0], true
		}
	}
	return "", false
}

// IsOurs reports whether it is a balancer of shunt's, a program that a balancer runs before itself, or a program that
// gives way to a balancer of the same process. If that is not known, Unread has the reason.
func (o *Occupant) IsOurs() bool {
	_, ok := o.Instance()
	return ok || o.Name == guestName
}

// TakeOff returns the instruction that detaches the program, with its commands.
func (o *Occupant) TakeOff() string {
	if how, ok := products[o.Name]; ok {
		return how
	}
	if instance, ok := o.Instance(); ok {
		return fmt.Sprintf("another instance of shunt is there: `shunt detach --instance %s`", instance)
	}
	if o.Name == "xdp_dispatcher" { // libxdp's, which runs several programs one after the other
		return fmt.Sprintf("`xdp-loader unload %s --all`, because it is the dispatcher of libxdp; or stop the program that uses libxdp", o.Interface)
	}
	if o.Link != 0 || o.Unread != nil {
		var remedies []string
		if len(o.Holders) > 0 {
			remedies = append(remedies, "stop "+processes(o.Holders))
		}
		if len(o.Pins) > 0 {
			remedies = append(remedies, "`rm "+strings.Join(o.Pins, " ")+"`")
		}
		if len(remedies) == 2 { // each of the two keeps the program attached
			remedies = []string{remedies[0] + " and " + remedies[1]}
		}
		if o.Link != 0 {
			return strings.Join(append(remedies, fmt.Sprintf("`bpftool link detach id %d`", o.Link)), ", or ")
		}
	}
	// Without the mode, ip detaches in native mode if the driver has that, and reports nothing if there is no
	// program (dev_xdp_mode in net/core/dev.c).
	word := map[Mode]string{ModeNative: "xdpdrv", ModeGeneric: "xdpgeneric", modeOffloaded: "xdpoffload"}[o.Mode]
	return fmt.Sprintf("stop its owner, or `ip link set dev %s %s off`", o.Interface, word)
}

// OccupiedError means that an interface has another XDP program. Nothing was changed.
type OccupiedError struct {
	Interface string
	Occupant  *Occupant
	Chain     string // how both can run, as an instruction; empty: they cannot
}

// Error has several lines: the program, and every remedy.
func (e *OccupiedError) Error() string {
	var text strings.Builder
	fmt.Fprintf(&text, "attach to interface %s: another XDP program is there already, and the kernel runs one per interface. Nothing was changed.\n", e.Interface)
	fmt.Fprintf(&text, "\tprogram     %s\n", e.Occupant)
	fmt.Fprintf(&text, "\treplace it  %s\n", e.Occupant.TakeOff())
	if e.Chain != "" {
		fmt.Fprintf(&text, "\trun both    %s\n", e.Chain)
	}
	fmt.Fprint(&text, "\t"+noOtherMode)
	return text.String()
}

// Freed reports whether the program has left the interface since. It looks in the calling thread's network namespace.
func (e *OccupiedError) Freed() bool {
	o, err := OccupantOf(e.Interface)
	return err == nil && (o == nil || o.ID != e.Occupant.ID)
}

// noOtherMode says that another mode does not help: many users try that first.
const noOtherMode = "`attach: generic` does not help: an interface has native or generic programs, not both"

// Occupied returns the error for an interface with a program on it; nil if there is none.
func Occupied(iface, chain string) error {
	o, err := OccupantOf(iface)
	if err != nil || o == nil {
		return err
	}
	_, product := products[o.Name]
	if _, ours := o.Instance(); ours || product {
		chain = "" // shunt is not chained to shunt
	}
	return &OccupiedError{iface, o, chain}
}

// refusedAsTaken reports whether the kernel said that a program is attached already.
func refusedAsTaken(err error) bool {
	return errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST)
}
