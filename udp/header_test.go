package udp_test

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/udp/proto"
	"github.com/shunt-lb/shunt/internal/udp/udptest"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
	"github.com/shunt-lb/shunt/udp"
)

var capital = regexp.MustCompile(`([a-z0-9])([A-Z])`)

// snake is a Go name as C writes it: VersionMin is version_min.
func snake(name string) string { return strings.ToLower(capital.ReplaceAllString(name, "${1}_$2")) }

// offsets asserts the offsets and the sizes of a message's fields.
func offsets(out *strings.Builder, name string, t reflect.Type, offset int) {
	for i := range t.NumField() {
		f := t.Field(i)
		size := binary.Size(reflect.New(f.Type).Interface())
		if f.Name != "_" {
			c := snake(f.Name)
			fmt.Fprintf(out, "static_assert(offsetof(struct %s, %s) == %d, \"\");\n", name, c, offset)
			fmt.Fprintf(out, "static_assert(sizeof(((struct %s *)0)->%s) == %d, \"\");\n", name, c, size)
		}
		offset += size
	}
	fmt.Fprintf(out, "static_assert(sizeof(struct %s) == %d, \"\");\n", name, offset)
}

// assertions are the protocol, as Go has it, for a C compiler to compare with the header.
func assertions() string {
	var out strings.Builder
	equal := func(name string, value any) { fmt.Fprintf(&out, "static_assert(%s == %d, \"\");\n", name, value) }
	out.WriteString("#include \"shunt_udp.h\"\n")
	offsets(&out, "shunt_udp_header", reflect.TypeFor[proto.Header](), 0)
	messages := []any{proto.Hello{}, proto.Welcome{}, proto.Request{}, proto.Grant{}, proto.Ready{}, proto.Serving{}, proto.Renew{}, proto.Renewed{}, proto.End{}, proto.Report{}, proto.Resume{}}
	for i, m := range messages {
		t := reflect.TypeOf(m)
		offsets(&out, "shunt_udp_msg_"+snake(t.Name()), t, binary.Size(proto.Header{}))
		equal("SHUNT_UDP_"+strings.ToUpper(snake(t.Name())), proto.TypeHello+proto.Type(i))
	}
	offsets(&out, "shunt_udp_address", reflect.TypeFor[proto.Address](), 0)
	offsets(&out, "shunt_udp_layout", reflect.TypeFor[proto.Queue](), 0)
	offsets(&out, "shunt_udp_count", reflect.TypeFor[proto.Count](), 0)
	offsets(&out, "shunt_udp_claim", reflect.TypeFor[proto.Claim](), 0)
	for _, mode := range []proto.Mode{proto.ModeZeroCopy, proto.ModeCopy, proto.ModeGeneric} {
		equal("SHUNT_UDP_"+strings.ToUpper(strings.ReplaceAll(mode.String(), "-", "_")), mode)
	}
	for code := proto.EndRefused; code <= proto.EndMalformed; code++ {
		equal("SHUNT_UDP_END_"+strings.ToUpper(strings.ReplaceAll(code.String(), " ", "_")), code)
	}
	equal("SHUNT_UDP_VERSION", proto.Version)
	equal("SHUNT_UDP_FLAG_STAMPED", proto.FlagStamped)
	equal("SHUNT_UDP_FLAG_BUSY_POLL", proto.FlagBusyPoll)
	equal("SHUNT_UDP_FLAG_REPORT", proto.FlagReport)
	equal("SHUNT_UDP_FLAG_SPIN", proto.FlagSpin)
	equal("SHUNT_UDP_FLAG_ADAPTIVE", proto.FlagAdaptive)
	equal("SHUNT_UDP_FLAG_SLEEP", proto.FlagSleep)
	equal("SHUNT_UDP_FLAG_RESUME", proto.FlagResume)
	equal("SHUNT_UDP_ADAPTIVE_US", proto.AdaptiveFor.Microseconds())
	equal("SHUNT_UDP_NO_CPU", proto.NoCPU)
	equal("SHUNT_UDP_QUEUES_MAX", proto.QueuesMax)
	equal("SHUNT_UDP_ADDRESSES_MAX", proto.AddressesMax)
	equal("SHUNT_UDP_NAME_MAX", proto.NameMax)
	equal("SHUNT_UDP_SIZE_MAX", proto.SizeMax)
	return out.String()
}

// The header in C has the broker's protocol. It has no source but the messages in Go.
func TestHeaderHasTheMessages(t *testing.T) {
	text, err := os.ReadFile("c/shunt_udp.h")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		fmt.Sprintf("#define SHUNT_UDP_MAGIC %q\n", proto.Magic),
		fmt.Sprintf("#define SHUNT_UDP_SOCKET %q ", udp.DefaultSocket),
	} {
		if !strings.Contains(string(text), line) {
			t.Errorf("the header has no line %q", line)
		}
	}
	path := filepath.Join(t.TempDir(), "a.c")
	if err := os.WriteFile(path, []byte(assertions()), 0o600); err != nil {
		t.Fatal(err)
	}
	udptest.EachCompiler(t, func(t *testing.T, c udptest.Compiler) { c.Compile(t, "-fsyntax-only", "-Ic", path) })
}

// frames are datagrams, whole and damaged.
func frames() (all [][]byte) {
	ip4 := append([]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 8, 0, 0x45, 0, 0, 33, 0, 0, 0x40, 0, 9, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 10,
		0x12, 0x34, 0x13, 0x88, 0, 13, 0, 0}, "hello\x00\x00\x00\x00"...) // with Ethernet's padding
	ip6 := append([]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0x86, 0xdd, 0x60, 0, 0, 0, 0, 12, 17, 9,
		0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2,
		0x12, 0x34, 0x13, 0x88, 0, 12, 0, 0}, "even"...)
	for _, whole := range [][]byte{ip4, ip6} {
		for size := range len(whole) + 1 {
			all = append(all, whole[:size])
		}
		for at := 12; at < 62 && at < len(whole); at++ {
			for _, value := range []byte{0, 1, 4, 8, 17, 20, 21, 0x45, 0x60, 0x80, 0xff} {
				damaged := slices.Clone(whole)
				damaged[at] = value
				all = append(all, damaged)
			}
		}
	}
	return all
}

// described is C's expected description of a frame, up to the reply.
func described(frame []byte) string {
	p, err := xsk.Parse(frame)
	if err != nil {
		return "-"
	}
	source, destination := p.Source.Addr().As16(), p.Destination.Addr().As16()
	header := 42
	if binary.BigEndian.Uint16(frame[12:]) == 0x86dd {
		header = 62
	}
	return fmt.Sprintf("%x %d %x %d %d %d ", source, p.Source.Port(), destination, p.Destination.Port(), header, len(p.Payload))
}

// sum is 0 if a checksum fits (RFC 1071).
func sum(parts ...[]byte) uint16 {
	total := uint32(0)
	for _, part := range parts {
		for i, b := range part {
			total += uint32(b) << (8 * (1 - i%2))
		}
	}
	for total > 0xffff {
		total = total>>16 + total&0xffff
	}
	return ^uint16(total)
}

// answers requires that a reply goes back, with checksums that fit.
func answers(t *testing.T, question, answer []byte) {
	t.Helper()
	q, err := xsk.Parse(question)
	if err != nil {
		t.Fatal(err)
	}
	a, err := xsk.Parse(answer)
	if err != nil || a.Source != q.Destination || a.Destination != q.Source || !bytes.Equal(a.Payload, q.Payload) ||
		!bytes.Equal(answer[:6], question[6:12]) || !bytes.Equal(answer[6:12], question[:6]) {
		t.Fatalf("%x is answered with %x: %v", question, answer, err)
	}
	ip, addresses, header := answer[14:], answer[26:34], 20
	if answer[12] == 0x86 {
		addresses, header = answer[22:54], 40
	} else if sum(ip[:20]) != 0 {
		t.Errorf("the checksum of IPv4 in %x", answer)
	}
	size := len(ip) - header
	if sum(ip[header:], addresses, []byte{0, 17, byte(size >> 8), byte(size)}) != 0 {
		t.Errorf("the checksum of UDP in %x", answer)
	}
}

// Rings and packets, in C as in Go.
func TestHeader(t *testing.T) {
	var in bytes.Buffer
	all := frames()
	for _, f := range all {
		in.Write(binary.NativeEndian.AppendUint32(nil, uint32(len(f))))
		in.Write(f)
	}
	udptest.EachCompiler(t, func(t *testing.T, c udptest.Compiler) {
		binary := filepath.Join(t.TempDir(), "check")
		c.Compile(t, "-O1", "-o", binary, "c/testdata/check.c")
		if out, err := exec.Command(binary, "rings").CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		parse := exec.Command(binary, "parse")
		parse.Stdin = bytes.NewReader(in.Bytes())
		out, err := parse.Output()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		lines, plain := strings.Split(strings.TrimSuffix(string(out), "\n"), "\n"), 0
		if len(lines) != len(all) {
			t.Fatalf("%d answers to %d frames", len(lines), len(all))
		}
		for i, frame := range all {
			want := described(frame)
			reply, same := strings.CutPrefix(lines[i], want)
			if !same {
				t.Errorf("%x is %q in C, and %q in Go", frame, lines[i], want)
			} else if want != "-" {
				plain++
				answer, err := hex.DecodeString(reply)
				if err != nil {
					t.Fatal(err)
				}
				answers(t, frame, answer)
			}
		}
		if plain < 100 || plain > len(all)/2+len(all)/3 {
			t.Errorf("of %d frames %d are plain UDP: they no longer try both", len(all), plain)
		}
	})
}

// The guide's example compiles.
func TestGuideCompiles(t *testing.T) {
	text, err := os.ReadFile("../docs/guide/udp.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(text), "```c\n#include \"shunt_udp.h\"\n")
	code, _, ended := strings.Cut(rest, "```")
	if !found || !ended {
		t.Fatal("docs/guide/udp.md shows no program in C")
	}
	path := filepath.Join(t.TempDir(), "a.c")
	if err := os.WriteFile(path, []byte("#include \"shunt_udp.h\"\nint main(void)\n{\n"+code+"return 0;\n}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	udptest.EachCompiler(t, func(t *testing.T, c udptest.Compiler) { c.Compile(t, "-fsyntax-only", "-Ic", path) })
}
