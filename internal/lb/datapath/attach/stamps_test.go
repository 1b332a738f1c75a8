package attach

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/store"
	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/lb/reconcile"
	"github.com/shunt-lb/shunt/internal/packet"
	"github.com/shunt-lb/shunt/internal/value"
)

// probeHead returns a struct probe_head of bpf/core/probe.h, and some bytes behind it.
func probeHead(session, sequence uint64, isAnswer byte) []byte {
	b := make([]byte, 100)
	copy(b, "shpt")
	b[4], b[5], b[6] = 1, 1, isAnswer
	binary.NativeEndian.PutUint64(b[8:], session)
	binary.BigEndian.PutUint64(b[16:], sequence)
	return b
}

// toStation gives a packet the MAC addresses with which shunt-a gets it.
func toStation(t *testing.T) packet.Edit {
	t.Helper()
	return packet.MACs(net.HardwareAddr{2, 0, 0, 0, 0, 7}, device(t, "shunt-a").Attrs().HardwareAddr)
}

// ringOf opens the stamps of an instance; nil: it has none.
func ringOf(t *testing.T, opts store.Options) *kernel.StampRing {
	t.Helper()
	rings, err := kernel.OpenStampRings(opts.PinRoot)
	must(t, err)
	t.Cleanup(func() { must(t, rings.Close()) })
	return rings.Rings()[opts.Instance]
}

// read returns the new stamps, with the moments as one bit: 1 if they are in order.
func read(r *kernel.StampRing) (all []kernel.Stamp) {
	r.Read(func(s kernel.Stamp) {
		if s.Begin > 0 && s.Begin <= s.End {
			s.Begin, s.End = 1, 1
		}
		all = append(all, s)
	})
	return all
}

// putDNS adds UDP ports to the service web: 53, and 54 of a service that has no backend.
func putDNS(t *testing.T, d *Plane) {
	t.Helper()
	putWeb(t, d)
	must(t, d.WriteSlots(200, reconcile.NewTable(make([]reconcile.Slot, 3))))
	must(t, d.PutService(reconcile.ServiceRecord{Index: webIndex + 1, Generation: 1, Name: "nobody", Forwarding: model.ForwardingNAT, Seed: 1, Offset: 200, Size: 3}))
	for port, service := range map[uint16]uint32{53: webIndex, 54: webIndex + 1} {
		must(t, d.PutFrontend(model.Frontend{Address: webVIP, Ports: value.PortRange{First: port, Last: port}, Protocol: model.UDP}, service))
	}
}

// TestProbesAreStamped sends probes and other packets through the loaded programs.
func TestProbesAreStamped(t *testing.T) {
	for _, mode := range []model.Attach{model.AttachNative, model.AttachTC} {
		t.Run(string(mode), func(t *testing.T) { probesAreStamped(t, mode) })
	}
}

func probesAreStamped(t *testing.T, mode model.Attach) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	_, err := d.Attach("shunt-a", mode)
	must(t, err)
	putDNS(t, d)
	must(t, d.StampProbes(true))
	ring := ringOf(t, opts)
	if ring == nil {
		t.Fatal("the stamps are not to be found")
	}
	const client4, client6 = "198.51.100.7", "2001:db8:9::7"
	ifindex := uint32(device(t, "shunt-a").Attrs().Index)
	stamp := func(sequence uint64, source, verdict, reason string) kernel.Stamp {
		s := kernel.Stamp{Session: 77, Sequence: sequence, Begin: 1, End: 1, Source: netip.MustParseAddr(source), Ifindex: ifindex, Verdict: verdict, AtTC: mode == model.AttachTC}
		for _, r := range kernel.Reasons() {
			if r.String() == reason {
				s.Reason = r
			}
		}
		return s
	}
	answer := stamp(4, client4, "pass", "not_ours")
	answer.IsAnswer = true
	echoReply := stamp(7, client6, "pass", "not_ours")
	echoReply.IsAnswer = true
	data := func(sequence uint64, isAnswer byte) packet.Edit {
		return packet.Data(probeHead(77, sequence, isAnswer))
	}
	spoilt := func(at int) packet.Edit {
		b := probeHead(77, 9, 0)
		b[at]++
		return packet.Data(b)
	}
	for _, c := range []struct {
		what string
		in   packet.Packet
		want []kernel.Stamp
	}{
		{"NAT", packet.NewUDP(client4+":4000", "192.0.2.10:53", data(1, 0)), []kernel.Stamp{stamp(1, client4, "send_back", "")}},
		{"no backend", packet.NewUDP(client4+":4000", "192.0.2.10:54", data(2, 0)), []kernel.Stamp{stamp(2, client4, "drop", "no_backend")}},
		{"no service", packet.NewUDP(client4+":4000", "192.0.2.10:55", data(3, 0)), []kernel.Stamp{stamp(3, client4, "pass", "no_service")}},
		{"an answer to others", packet.NewUDP(client4+":4000", "192.0.2.99:55", data(4, 1)), []kernel.Stamp{answer}},
		{"IPv6", packet.NewUDP("["+client6+"]:4000", "[2001:db8:1::99]:53", data(5, 0)), []kernel.Stamp{stamp(5, client6, "pass", "not_ours")}},
		{"ICMP", packet.NewEcho(client4, "192.0.2.10", 1, 6, data(6, 0)), []kernel.Stamp{stamp(6, client4, "answer", "echo_answered")}},
		{"ICMPv6, an answer", packet.NewEcho(client6, "2001:db8:1::99", 1, 7, data(7, 0), func(p *packet.Packet) { p.ICMPv6.Type = 129 }), []kernel.Stamp{echoReply}},
		{"another magic", packet.NewUDP(client4+":4000", "192.0.2.10:53", spoilt(3)), nil},
		{"another version", packet.NewUDP(client4+":4000", "192.0.2.10:53", spoilt(4)), nil},
		{"a report", packet.NewUDP(client4+":4000", "192.0.2.10:53", spoilt(5)), nil},
		{"a head that is cut off", packet.NewUDP(client4+":4000", "192.0.2.10:53", packet.Data(probeHead(77, 9, 0)[:23])), nil},
		{"no probe", packet.NewUDP(client4+":4000", "192.0.2.10:53"), nil},
		{"a first fragment", packet.NewUDP(client4+":4000", "192.0.2.99:53", data(9, 0), packet.Fragmented(1, 0, true)), nil},
		{"options", packet.NewUDP(client4+":4000", "192.0.2.99:53", data(9, 0), packet.IPv4Options(1, 1, 1, 1)), nil},
		{"extension headers", packet.NewUDP("["+client6+"]:4000", "[2001:db8:1::99]:53", data(9, 0), packet.Extended(packet.Padding(60, 1))), nil},
		{"a tag", packet.NewUDP(client4+":4000", "192.0.2.99:53", data(9, 0), packet.Tagged(7)), nil},
		{"TCP", packet.NewTCP(client4+":4000", "192.0.2.10:80", "PA", data(9, 0)), nil},
		{"after all these", packet.NewUDP(client4+":4000", "192.0.2.10:53", data(10, 0)), []kernel.Stamp{stamp(10, client4, "send_back", "")}},
	} {
		_, _, err := d.RunPacket("shunt-a", packet.Must(c.in.With(toStation(t))))
		must(t, err)
		if diff := cmp.Diff(c.want, read(ring), cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.what, diff)
		}
	}
	// A packet behind a probe does not change the probe's stamp.
	for _, in := range []packet.Packet{packet.NewUDP(client4+":4000", "192.0.2.10:54", data(11, 0)), packet.NewUDP(client4+":4000", "192.0.2.99:54")} {
		_, _, err := d.RunPacket("shunt-a", packet.Must(in.With(toStation(t))))
		must(t, err)
	}
	if got, want := read(ring), stamp(11, client4, "drop", "no_backend"); len(got) != 1 || got[0] != want {
		t.Errorf("behind a probe: %+v, want %+v", got, want)
	}
	if ring.Missed != 0 {
		t.Errorf("%d stamps are missed", ring.Missed)
	}
}

// TestStampsGoRound: a reader that comes too late knows the number of stamps that it has missed.
func TestStampsGoRound(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	must(t, d.StampProbes(true)) // before the program is loaded
	_, err := d.Attach("shunt-a", model.AttachNative)
	must(t, err)
	ring := ringOf(t, opts)
	frame := packet.Must(packet.NewUDP("198.51.100.7:4000", "192.0.2.99:53", packet.Data(probeHead(1, 1, 0)), toStation(t)))
	const size, more = 65536, 5
	for round, c := range []struct{ runs, read, missed int }{{3, 3, 0}, {size + more, size, more}, {2 * size, size, more + size}, {size, size, more + size}, {0, 0, more + size}} {
		if c.runs > 0 {
			_, err := d.attached["shunt-a"].programs[0].Run(&ebpf.RunOptions{Data: frame, Repeat: uint32(c.runs)})
			must(t, err)
		}
		if got := len(read(ring)); got != c.read || ring.Missed != uint64(c.missed) {
			t.Errorf("round %d: of %d stamps %d are read, and %d are missed since the beginning; want %d and %d", round, c.runs, got, ring.Missed, c.read, c.missed)
		}
	}
}

// TestStampsAreSwitched: with them the program is replaced, without them it is as before; the ring outlives the daemon.
func TestStampsAreSwitched(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	_, err := d.Attach("shunt-a", model.AttachNative)
	must(t, err)
	frame := packet.Must(packet.NewUDP("198.51.100.7:4000", "192.0.2.99:53", packet.Data(probeHead(1, 1, 0)), toStation(t)))
	run := func() {
		t.Helper()
		if verdict, _, err := d.RunPacket("shunt-a", frame); err != nil || verdict != kernel.XDPPass {
			t.Errorf("the probe is not passed: %d, %v", verdict, err)
		}
	}
	plain, link := loadedSize(t, "shunt-a"), d.attached["shunt-a"].link
	run()
	if r := ringOf(t, opts); r != nil {
		t.Fatal("there are stamps, which nobody has asked for")
	}
	must(t, d.StampProbes(true))
	ring := ringOf(t, opts)
	stamping := programID(t, "shunt-a")
	must(t, d.StampProbes(true))
	if programID(t, "shunt-a") != stamping || d.attached["shunt-a"].link != link || loadedSize(t, "shunt-a") <= plain {
		t.Error("the program was replaced for nothing, or its link was, or it is no larger")
	}
	run()
	must(t, d.Close())
	d = mustOpen(t, opts)
	must(t, d.StampProbes(true))
	_, err = d.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	run()
	if got := read(ring); len(got) != 2 || ring.Missed != 0 {
		t.Errorf("with a new daemon, the ring has %v", got)
	}
	must(t, d.StampProbes(false))
	run()
	if got := read(ring); len(got) != 0 || loadedSize(t, "shunt-a") != plain {
		t.Errorf("without stamps the program has %d bytes, %d before, and stamped %v", loadedSize(t, "shunt-a"), plain, got)
	}
	// A predecessor's stamps go, too.
	must(t, d.StampProbes(true))
	must(t, d.Close())
	d = mustOpen(t, opts)
	must(t, d.StampProbes(false))
	_, err = d.Attach("shunt-a", model.AttachAuto)
	must(t, err)
	if left, err := filepath.Glob(filepath.Join(kernel.Directory(opts.PinRoot, opts.Instance), "stamps*")); err != nil || len(left) > 0 || loadedSize(t, "shunt-a") != plain {
		t.Errorf("left by the predecessor: %v, %v, and a program of %d bytes, not %d", left, err, loadedSize(t, "shunt-a"), plain)
	}
}

// TestStampsAreSwitchedAtTC: stamps replace the program for incoming frames; packets that the host sends get no stamp.
func TestStampsAreSwitchedAtTC(t *testing.T) {
	for _, c := range tcModes() {
		t.Run(c.name, func(t *testing.T) {
			inNamespace(t)
			opts := testOptions(t)
			d := mustOpen(t, opts)
			d.withoutTCX = c.withoutTCX
			_, err := d.Attach("shunt-a", model.AttachTC)
			must(t, err)
			frame := packet.Must(packet.NewUDP("198.51.100.7:4000", "192.0.2.99:53", packet.Data(probeHead(1, 1, 0)), toStation(t)))
			run := func() {
				t.Helper()
				for name, run := range map[string]func(string, []byte) (uint32, []byte, error){"in": d.RunPacket, "out": d.RunPacketOut} {
					if verdict, _, err := run("shunt-a", frame); err != nil || verdict != kernel.XDPPass {
						t.Errorf("%s, the probe is not passed: %d, %v", name, verdict, err)
					}
				}
			}
			size := func() int {
				t.Helper()
				p, err := ebpf.NewProgramFromID(requireAtTC(t, "shunt-a", true)["sh_tc_in"])
				must(t, err)
				defer p.Close()
				info, err := p.Info()
				must(t, err)
				n, err := info.TranslatedSize()
				must(t, err)
				return n
			}
			plain := size()
			run()
			must(t, d.StampProbes(true))
			ring := ringOf(t, opts)
			run()
			must(t, d.Close())
			d = mustOpen(t, opts)
			d.withoutTCX = c.withoutTCX
			must(t, d.StampProbes(true))
			_, err = d.Attach("shunt-a", model.AttachTC)
			must(t, err)
			run()
			if got := read(ring); len(got) != 2 || ring.Missed != 0 || !got[0].AtTC || size() <= plain {
				t.Errorf("with stamps, and a new daemon, the ring has %v, and the program %d bytes, not more than %d", got, size(), plain)
			}
			must(t, d.StampProbes(false))
			run()
			if got := read(ring); len(got) != 0 || size() != plain {
				t.Errorf("without stamps the program has %d bytes, %d before, and stamped %v", size(), plain, got)
			}
		})
	}
}

// onCPU binds a locked thread to the n-th of the CPUs that it may use, counted round and round.
func onCPU(n int) error {
	var allowed, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return err
	}
	skip := n % allowed.Count()
	for i := range 1024 {
		if allowed.IsSet(i) {
			if skip == 0 {
				one.Set(i)
			}
			skip--
		}
	}
	return unix.SchedSetaffinity(0, &one)
}

// TestStampsOfTwoCPUs: each stamp has a number of its own, and a stamp that is read is of one run.
func TestStampsOfTwoCPUs(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	must(t, d.StampProbes(true))
	_, err := d.Attach("shunt-a", model.AttachNative)
	must(t, err)
	ring := ringOf(t, opts)
	runs := uint32(400_000)
	if testing.Short() { // an emulated machine
		runs = 100_000
	}
	ended := make(chan error, 2)
	for cpu := range 2 {
		program := d.attached["shunt-a"].programs[0]
		side := uint64(cpu + 1)
		frame := packet.Must(packet.NewUDP("198.51.100.7:4000", "192.0.2.99:53", packet.Data(probeHead(side, side, byte(cpu))), toStation(t)))
		go func() {
			runtime.LockOSThread() // and never unlocked: the thread ends with it
			err := onCPU(cpu)
			if err == nil {
				_, err = program.Run(&ebpf.RunOptions{Data: frame, Repeat: runs})
			}
			ended <- err
		}()
	}
	var taken, wrong uint64
	take := func(s kernel.Stamp) {
		taken++
		if s.Session != s.Sequence || s.IsAnswer != (s.Session == 2) || s.Begin > s.End || s.Verdict != "pass" {
			wrong++
		}
		if wrong == 1 {
			t.Errorf("a stamp is of two runs: %+v", s)
		}
	}
	for left := 2; left > 0; {
		select {
		case err := <-ended:
			must(t, err)
			left--
		default:
			ring.Read(take)
		}
	}
	ring.Read(take)
	if taken+ring.Missed != 2*uint64(runs) {
		t.Errorf("of %d stamps %d are read, and %d are missed", 2*runs, taken, ring.Missed)
	}
}

// TestStampsThatCannotBeLoaded: the switch stays off, and another try fails, too.
func TestStampsThatCannotBeLoaded(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	_, err := d.Attach("shunt-a", model.AttachNative)
	must(t, err)
	must(t, d.attached["shunt-a"].link.Close()) // then it takes no program
	for range 2 {
		if err := d.StampProbes(true); err == nil {
			t.Fatal("stamps are on, though the program could not be replaced")
		}
		if _, err := os.Stat(filepath.Join(kernel.Directory(opts.PinRoot, opts.Instance), "stamps-1")); !os.IsNotExist(err) {
			t.Errorf("the stamps are left: %v", err)
		}
	}
}

// TestStampsAreTakenAway with the instance.
func TestStampsAreTakenAway(t *testing.T) {
	inNamespace(t)
	opts := testOptions(t)
	d := mustOpen(t, opts)
	must(t, d.StampProbes(true))
	listed, err := PinnedOf(opts.Instance)
	must(t, err)
	found := false
	for _, p := range listed {
		found = found || p.What == "stamps of probes"
	}
	if !found {
		t.Errorf("the stamps are not in %v", listed)
	}
	must(t, RemoveFrom(opts))
	if _, err := os.Stat(kernel.Directory(opts.PinRoot, opts.Instance)); !os.IsNotExist(err) {
		t.Errorf("something is left: %v", err)
	}
}
