package sock

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/namespace"
)

// closer walks through sockets.
type closer struct {
	iterators []*link.Iter // close
	namers    []*link.Iter // report which backends of which services sockets have
	left      *ebpf.Map    // pairs of backend and service whose sockets the iterators close
}

// Closed is the number of closed sockets, by reason.
type Closed struct {
	Gone int // their backend was removed
	Down int // their backend is down, and no connection was established
	Left int // their backend has left the service, and another service still has it
}

// Total returns the sum.
func (c Closed) Total() int { return c.Gone + c.Down + c.Left }

func (c *Closed) add(end uint8) {
	switch sockcloseSockEnd(end) {
	case sockcloseSockEndEND_GONE:
		c.Gone++
	case sockcloseSockEndEND_DOWN:
		c.Down++
	case sockcloseSockEndEND_LEFT:
		c.Left++
	}
}

// loadCloser loads the iterators, which are not attached to anything.
func loadCloser(plane DataPlane, own map[string]*ebpf.Map) (c closer, err error) {
	coll, err := plane.LoadBeside(loadSockclose, map[string]*ebpf.Map{sockMapShSkChoices: own[sockMapShSkChoices]})
	if err != nil {
		return c, fmt.Errorf("load the programs that close sockets: %w", err)
	}
	defer coll.Close()
	for _, kind := range []struct {
		to       *[]*link.Iter
		programs [2]string
	}{
		{&c.iterators, [2]string{sockcloseProgShCloseTcp, sockcloseProgShCloseUdp}},
		{&c.namers, [2]string{sockcloseProgShPairsTcp, sockcloseProgShPairsUdp}},
	} {
		for _, name := range kind.programs {
			iterator, err := kernel.AttachIter(coll.Programs[name], name)
			if err != nil {
				return closer{}, errors.Join(err, c.close())
			}
			*kind.to = append(*kind.to, iterator)
		}
	}
	c.left = coll.DetachMap(sockcloseMapShSkLeft)
	return c, nil
}

func (c *closer) close() error {
	var errs []error
	for _, iterator := range slices.Concat(c.iterators, c.namers) {
		errs = append(errs, iterator.Close())
	}
	if c.left != nil {
		errs = append(errs, c.left.Close())
	}
	*c = closer{}
	return errors.Join(errs...)
}

// CloseGone closes every socket to which connect() gave a backend that is gone now. If the backend is down, it
// closes UDP sockets and TCP handshakes, but no established connection. If members is not nil, it also closes
// sockets whose backend is not among the members. It visits each network namespace with a process of the cgroup. A
// closed socket's program gets an error from its next call, and can connect again. CloseGone returns the numbers of
// closed sockets, and adds them to Outcomes. It does not find a socket in a namespace without any process of the
// cgroup. Not to be called concurrently.
func (s *Sockets) CloseGone(members *Members) (closed Closed, err error) {
	spaces, err := namespaces(s.opts.Cgroup)
	if err != nil {
		return closed, fmt.Errorf("close the sockets of backends that are gone: %w", err)
	}
	var errs []error
	defer func() { err = errors.Join(err, s.count(closed)) }()
	for _, space := range spaces {
		errs = append(errs, namespace.Inside(space, func() error {
			left, err := s.closer.leftPairs(members)
			if err != nil {
				return err
			}
			moment := uint64(0)
			if members != nil {
				moment = members.moment
			}
			return s.closer.eachLot(left, moment, func() error { return s.closer.run(&closed) })
		}))
		_ = space.Close()
	}
	if err := errors.Join(errs...); err != nil {
		return closed, fmt.Errorf("close the sockets of backends that are gone: %w", err)
	}
	return closed, nil
}

// count adds to the counters. Nothing else writes the counters of these outcomes.
func (s *Sockets) count(closed Closed) error {
	for outcome, n := range map[sockSockOutcome]int{
		sockSockOutcomeOUTCOME_CLOSED_GONE: closed.Gone,
		sockSockOutcomeOUTCOME_CLOSED_DOWN: closed.Down,
		sockSockOutcomeOUTCOME_CLOSED_LEFT: closed.Left,
	} {
		if n == 0 {
			continue
		}
		var each []uint64
		err := s.maps[sockMapShSkOutcomes].Lookup(outcome, &each)
		if err == nil {
			each[0] += uint64(n)
			err = s.maps[sockMapShSkOutcomes].Put(outcome, each)
		}
		if err != nil {
			return fmt.Errorf("count the sockets that were closed: %w", err)
		}
	}
	return nil
}

// run closes the sockets of the calling thread's network namespace, and counts them.
func (c *closer) run(closed *Closed) error {
	for _, iterator := range c.iterators {
		all, err := walk[sockcloseSockGone](iterator)
		if err != nil {
			return err
		}
		missing := map[uint64]bool{}
		for _, gone := range all {
			if gone.Closed == 0 {
				err := destroy(gone)
				if errors.Is(err, unix.ENOENT) {
					missing[gone.Cookie] = true
					continue
				}
				if err != nil {
					return err
				}
			}
			closed.add(gone.End)
		}
		if err := ended(iterator, missing); err != nil {
			return err
		}
	}
	return nil
}

// ended checks that sockets that SOCK_DIAG did not find ended by themselves. SOCK_DIAG also finds none if a
// module of the kernel is missing, with the same error.
func ended(iterator *link.Iter, missing map[uint64]bool) error {
	if len(missing) == 0 {
		return nil
	}
	all, err := walk[sockcloseSockGone](iterator)
	if err != nil {
		return err
	}
	for _, gone := range all {
		if missing[gone.Cookie] {
			return errors.New("close a socket: it exists, and the kernel finds none with its addresses; without bpf_sock_destroy (before Linux 6.5) it needs two modules: `modprobe -a tcp_diag udp_diag`")
		}
	}
	return nil
}

// walk runs an iterator over all sockets, and reads its output.
func walk[T any](iterator *link.Iter) (all []T, err error) {
	reader, err := iterator.Open()
	if err != nil {
		return nil, fmt.Errorf("walk through the sockets: %w", err)
	}
	defer reader.Close()
	text, err := io.ReadAll(bufio.NewReaderSize(reader, 1<<16))
	if err != nil {
		return nil, fmt.Errorf("walk through the sockets: %w", err)
	}
	all = make([]T, len(text)/binary.Size(*new(T)))
	if err := binary.Read(bytes.NewReader(text), binary.NativeEndian, all); err != nil {
		return nil, fmt.Errorf("read the list of sockets to close: %w", err)
	}
	return all, nil
}

// diagRequest is struct inet_diag_req_v2 (include/uapi/linux/inet_diag.h): ports and addresses are in
// wire order.
type diagRequest struct {
	Family, Protocol, Ext, Pad  uint8
	States                      uint32
	SourcePort, DestinationPort uint16
	Source, Destination         [16]byte
	Interface                   uint32
	CookieLow, CookieHigh       uint32
}

// Len implements netlink's interface.
func (r *diagRequest) Len() int { return binary.Size(r) }

// Serialize implements netlink's interface.
func (r *diagRequest) Serialize() []byte {
	var b bytes.Buffer
	_ = binary.Write(&b, binary.NativeEndian, r) // which fails for types without a size alone
	return b.Bytes()
}

// destroy closes one socket of the calling thread's network namespace through SOCK_DIAG: the kernel finds it by
// its addresses, and refuses if it has another cookie (sock_diag_check_cookie). ENOENT also means that the
// socket is gone.
func destroy(gone sockcloseSockGone) error {
	request := &diagRequest{
		Family: gone.Family, Protocol: gone.Protocol, States: ^uint32(0), SourcePort: gone.SourcePort, DestinationPort: gone.DestinationPort,
		Source: wireAddress(gone.Family, gone.Source), Destination: wireAddress(gone.Family, gone.Destination),
		Interface: gone.Ifindex, CookieLow: uint32(gone.Cookie), CookieHigh: uint32(gone.Cookie >> 32),
	}
	message := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
	message.AddData(request)
	_, err := message.Execute(unix.NETLINK_INET_DIAG, 0)
	if errors.Is(err, unix.ESTALE) {
		return unix.ENOENT
	}
	if errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("close a socket: %w; this kernel has neither bpf_sock_destroy (Linux 6.5) nor CONFIG_INET_DIAG_DESTROY", err)
	}
	if err != nil {
		return fmt.Errorf("close a socket: %w", err)
	}
	return nil
}

// wireAddress returns an address as in SOCK_DIAG: IPv4 in the first four bytes.
func wireAddress(family uint8, a sockcloseAddr) (b [16]byte) {
	binary.NativeEndian.PutUint64(b[:], a.High)
	binary.NativeEndian.PutUint64(b[8:], a.Low)
	if family == unix.AF_INET {
		return [16]byte{b[12], b[13], b[14], b[15]}
	}
	return b
}

// namespaces returns the network namespaces of the threads of a cgroup's processes. The caller closes them.
// Processes that this process's /proc does not show are not found.
func namespaces(cgroup string) (found []netns.NsHandle, err error) {
	type inode struct{ device, number uint64 }
	seen := map[inode]bool{}
	err = eachProcess(cgroup, func(pid string) {
		threads, _ := filepath.Glob("/proc/" + pid + "/task/*/ns/net") // which fails for a bad pattern alone
		for _, path := range threads {
			var stat unix.Stat_t
			if unix.Stat(path, &stat) != nil || seen[inode{stat.Dev, stat.Ino}] {
				continue // gone, or looked at
			}
			space, err := netns.GetFromPath(path)
			if err != nil {
				continue
			}
			seen[inode{stat.Dev, stat.Ino}] = true
			found = append(found, space)
		}
	})
	return found, err
}

// eachProcess calls f for each process of a cgroup, and of the cgroups below.
func eachProcess(cgroup string, f func(pid string)) error {
	return filepath.WalkDir(cgroup, func(path string, entry os.DirEntry, err error) error {
		if errors.Is(err, os.ErrNotExist) && path != cgroup {
			return nil // it went as it was looked at
		}
		if err != nil {
			return fmt.Errorf("list the processes of the cgroup %s: %w", path, err)
		}
		if !entry.IsDir() {
			return nil
		}
		text, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		switch {
		case errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV):
			return nil
		case errors.Is(err, syscall.EOPNOTSUPP):
			return nil // a threaded one: its processes are listed further up (cgroups(7))
		case err != nil:
			return fmt.Errorf("list the processes of the cgroup %s: %w", path, err)
		}
		for pid := range strings.Lines(string(text)) {
			f(strings.TrimSpace(pid))
		}
		return nil
	})
}
