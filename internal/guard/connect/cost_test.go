package connect

import (
	"fmt"
	bitcount "math/bits"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/policy"
)

// BenchmarkConnect measures connect(2) of a socket of UDP, which sends nothing: without programs, of a program that no rule is about,
// and of one that a rule is about, with few addresses and with many.
//
//	go test -run '^$' -bench Connect -count 7 ./internal/guard/connect
func BenchmarkConnect(b *testing.B) {
	var many []policy.Target
	for i := range 1000 {
		many = append(many, to(fmt.Sprintf("10.%d.%d.0/24", i/250, i%250))...)
	}
	for _, c := range []struct {
		name    string
		rules   func(*bed) []policy.Connection
		program func(*bed) string
	}{
		{"no-program", nil, func(b *bed) string { return b.subject }},
		{"no-rule", func(b *bed) []policy.Connection { return b.everything(policy.Deny)[:1] }, func(b *bed) string { return b.other }},
		{"two-addresses", func(b *bed) []policy.Connection { return b.everything(policy.Deny)[:1] }, func(b *bed) string { return b.subject }},
		{"thousand-addresses", func(b *bed) []policy.Connection {
			rule := b.everything(policy.Deny)[0]
			rule.To = many
			return []policy.Connection{rule}
		}, func(b *bed) string { return b.subject }},
	} {
		b.Run(c.name, func(b *testing.B) {
			bed := newBed(b, Cgroup)
			if c.rules != nil {
				defer bed.open(c.rules(bed)...).Close()
			}
			said := bed.does(c.program(bed), "time "+strconv.Itoa(b.N)+" 127.0.0.1:7003")
			ns, err := strconv.ParseFloat(said, 64)
			if err != nil {
				b.Fatal(said, err)
			}
			b.ReportMetric(ns, "ns/connect")
			b.ReportMetric(0, "ns/op") // which has the start of the process in it
		})
	}
}

// A program that no rule is about is recognised by one bit of its inode number, and no rule is looked up: the set bits
// are the bits of all programs of rules, and no others.
func TestOnlyProgramsOfRulesAreLookedUp(t *testing.T) {
	b := newBed(t, Cgroup)
	d := b.open(b.everything(policy.Deny)[:1]...)
	defer d.Close()
	var bits int
	var word uint64
	var file connectGuardFile
	filter := d.coll.Maps[connectMapShC_filter]
	for number := range filter.MaxEntries() {
		if err := filter.Lookup(number, &word); err != nil {
			t.Fatal(err)
		}
		bits += bitcount.OnesCount64(word)
	}
	if bits != 1 {
		t.Errorf("%d bits are set, of one program", bits)
	}
	programs := d.coll.Maps[connectMapShC_programs].Iterate()
	for programs.Next(&file, new(uint64)) {
		bit := file.Inode % (64 * uint64(filter.MaxEntries()))
		if err := filter.Lookup(uint32(bit/64), &word); err != nil || word>>(bit%64)&1 == 0 {
			t.Errorf("the bit of %+v is not set: %#x, %v", file, word, err)
		}
	}
	if err := programs.Err(); err != nil {
		t.Fatal(err)
	}
}

// timeConnects prints the nanoseconds of CPU that a call takes.
func timeConnects(arguments []string) error {
	n, err := strconv.Atoi(arguments[0])
	if err != nil {
		return err
	}
	at := netip.MustParseAddrPort(arguments[1])
	return with(familyOf(at), unix.SOCK_DGRAM, 0, func(fd int) error {
		begin := cpuTime()
		for range n {
			if err := call(unix.SYS_CONNECT, fd, at, 0); err != nil {
				return err
			}
		}
		fmt.Println(strings.TrimSpace(fmt.Sprintf("%.1f", float64((cpuTime()-begin).Nanoseconds())/float64(n))))
		os.Exit(0)
		return nil
	})
}

// cpuTime is the time that this thread has had a CPU.
func cpuTime() time.Duration {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now) // cannot fail with this clock
	return time.Duration(now.Nano())
}
