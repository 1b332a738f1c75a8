package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/bench/bed"
)

// katran is a peer of direct return with IPIP: github.com/facebookincubator/katran, compiled from a
// checkout, with the same service and backends as shunt, and no daemon. It remembers the backend of each
// flow in a table per CPU, and its program finds the flow there.
//
// Left out, like its daemon: a table by Maglev. Each slot has a backend by chance, in proportion to
// the weights, because a packet's cost does not depend on the order of the slots.
type katran struct {
	programs *ebpf.Collection
	flows    *ebpf.Map // of the CPU that measures
	commit   string
}

// The sizes of katran's maps and its indices in them: katran/lib/bpf/balancer_consts.h. Of a table of
// 8,000,000 flows, kDefaultLruSize of katran/lib/KatranLbStructs.h, each of two CPUs has a half.
const (
	katranProgram    = "balancer_ingress"
	katranSlots      = 65537 // RING_SIZE, for each VIP
	katranVIPs       = 512   // MAX_VIPS; then come counters of all VIPs
	katranFlows      = 4_000_000
	katranMissed     = katranVIPs + 0 // LRU_CNTRS: packets, and packets without a flow
	katranBackendIP6 = 1 << 0         // F_IPV6
)

// Structs of katran/lib/bpf/balancer_structs.h.
type (
	katranVIP struct {
		Address  [16]byte // of IPv4 the first 4
		Port     [2]byte  // big endian
		Protocol uint8
		_        uint8
	}
	katranVIPMeta struct{ Flags, Number uint32 }
	katranBackend struct {
		Address [16]byte
		Flags   uint8
		_       [3]uint8
	}
	katranControl  struct{ MAC [8]byte } // the first 6
	katranCounters struct{ V1, V2 uint64 }
)

// loadKatran compiles and loads katran's program, and writes its maps: packets go to the next hop with
// this MAC address.
func loadKatran(o options, next net.HardwareAddr) (*katran, error) {
	k := &katran{}
	if err := k.load(o, next); err != nil {
		return nil, errors.Join(err, k.close())
	}
	return k, nil
}

func (k *katran) load(o options, next net.HardwareAddr) error {
	dir, err := os.MkdirTemp("", "shunt-katran-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	object := filepath.Join(dir, "balancer.o")
	// With __x86_64__, the C library's headers do not include the headers for 32 bits.
	clang := exec.Command("clang-19", "-O2", "-g", "-target", "bpf", "-D__KERNEL__", "-D__x86_64__", "-w", "-I.", "-I/usr/include/x86_64-linux-gnu",
		"-c", "katran/lib/bpf/balancer.bpf.c", "-o", object)
	clang.Dir = o.katran
	if out, err := clang.CombinedOutput(); err != nil {
		return fmt.Errorf("compile katran in %s: %w\n%s\nWant a checkout of github.com/facebookincubator/katran, and clang-19", o.katran, err, out)
	}
	if out, err := exec.Command("git", "-C", o.katran, "rev-parse", "--short=12", "HEAD").Output(); err == nil {
		k.commit = strings.TrimSpace(string(out))
	}
	spec, err := ebpf.LoadCollectionSpec(object)
	if err != nil {
		return fmt.Errorf("read katran's object: %w", err)
	}
	program, ok := spec.Programs[katranProgram]
	if !ok {
		return fmt.Errorf("katran's object has no program %s", katranProgram)
	}
	program.Flags |= unix.BPF_F_XDP_HAS_FRAGS // as the front has it
	if k.programs, err = ebpf.NewCollection(spec); err != nil {
		return fmt.Errorf("load katran: %w", err)
	}
	if k.flows, err = ebpf.NewMap(&ebpf.MapSpec{
		Type: ebpf.LRUHash, KeySize: spec.Maps["fallback_cache"].KeySize, ValueSize: spec.Maps["fallback_cache"].ValueSize, MaxEntries: katranFlows,
	}); err != nil {
		return fmt.Errorf("make katran's table of flows: %w", err)
	}
	if err := k.configure(o, next); err != nil {
		return fmt.Errorf("write katran's maps: %w", err)
	}
	return nil
}

// configure writes the service of directSubject.writeConfig.
func (k *katran) configure(o options, next net.HardwareAddr) error {
	put := func(name string, key, value any) error {
		m, ok := k.programs.Maps[name]
		if !ok {
			return fmt.Errorf("katran has no map %s", name)
		}
		if err := m.Put(key, value); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		return nil
	}
	var control katranControl
	copy(control.MAC[:], next)
	errs := []error{put("ctl_array", uint32(0), control), put("lru_mapping", uint32(o.cpu), k.flows)}
	// Katran's first backend has the number 1.
	for i, address := range []netip.Addr{bed.ServerOne, bed.ServerTwo, serverOne6} {
		backend := katranBackend{}
		copy(backend.Address[:], address.AsSlice())
		if address.Is6() {
			backend.Flags = katranBackendIP6
		}
		errs = append(errs, put("reals", uint32(i+1), backend))
	}
	random := rand.New(rand.NewPCG(1, 2))
	for number, service := range []struct {
		address  netip.Addr
		protocol uint8
		backends []uint32 // by weight
	}{
		{bed.VIP, unix.IPPROTO_TCP, []uint32{1, 2, 2}},
		{bed.VIP, unix.IPPROTO_UDP, []uint32{1, 2, 2}},
		{vip6, unix.IPPROTO_TCP, []uint32{3}},
	} {
		vip := katranVIP{Protocol: service.protocol}
		copy(vip.Address[:], service.address.AsSlice())
		binary.BigEndian.PutUint16(vip.Port[:], servicePort)
		errs = append(errs, put("vip_map", vip, katranVIPMeta{Number: uint32(number)}))
		keys, slots := make([]uint32, katranSlots), make([]uint32, katranSlots)
		for i := range slots {
			keys[i] = uint32(number*katranSlots + i)
			slots[i] = service.backends[random.IntN(len(service.backends))]
		}
		_, err := k.programs.Maps["ch_rings"].BatchUpdate(keys, slots, nil)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (k *katran) program() *ebpf.Program { return k.programs.Programs[katranProgram] }

// missed is the number of packets so far whose flow was in no table.
func (k *katran) missed() (sum uint64, err error) {
	var all []katranCounters // of each CPU
	if err := k.programs.Maps["stats"].Lookup(uint32(katranMissed), &all); err != nil {
		return 0, fmt.Errorf("read katran's counters: %w", err)
	}
	for _, c := range all {
		sum += c.V2
	}
	return sum, nil
}

// rememberAll sends packets of all flows until a whole pass finds every flow in katran's table. It takes
// in 125,000 flows a second at most (MAX_CONN_RATE).
func (k *katran) rememberAll(b *bench) error {
	for started := time.Now(); time.Since(started) < rememberLimit; {
		before, err := k.missed()
		if err != nil {
			return err
		}
		if err := b.check(k.program()); err != nil {
			return err
		}
		after, err := k.missed()
		if err != nil {
			return err
		}
		if after == before {
			return nil
		}
	}
	return fmt.Errorf("after %s not all of %d flows are in katran's table", rememberLimit, b.flows)
}

func (k *katran) close() error {
	var err error
	if k.programs != nil {
		k.programs.Close()
	}
	if k.flows != nil {
		err = k.flows.Close()
	}
	return err
}
