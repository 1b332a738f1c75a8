package broken_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/test/unchanged"
	"github.com/shunt-lb/shunt/test/variant"
)

// breakage is a program with one fault, and the test that has to fail for it.
type breakage struct {
	name string
	variant.Change
	test    string // its name in the package
	in      string // the package, seen from test/
	says    string // part of the test's output
	twoCPUs bool   // the fault shows only with two CPUs
}

var breakages = []breakage{
	{
		// A slot that names one backend twice is taken for settled, and flows of the other are lost.
		name: "backends compared instead of the state read",
		Change: variant.Change{
			File: "lb/place.h",
			From: "\tif (!(features & FEATURE_REMEMBER))\n\t\treturn slot_current(slot);\n",
			To:   "\tif (!(features & FEATURE_REMEMBER) || slot_current(slot) == (slot & BACKEND_REF_MASK))\n\t\treturn slot_current(slot);\n",
		},
		in: "place", test: "TestHardCases", says: "by the rules to",
	},
	{
		// A packet follows the entry of another flow, which was given the element meanwhile.
		name: "the seal of a flow not checked",
		Change: variant.Change{
			File: "lb/flow.h",
			From: "copy->seal != flow_seal(key, copy) || !life_belongs",
			To:   "!life_belongs",
		},
		in: "packet", test: "TestForeignValues", says: "a packet was to find no flow",
	},
	{
		name: "the seal of a remembered flow not checked",
		Change: variant.Change{
			File: "lb/remember.h",
			From: "copy->seal != remembered_seal(key, copy)",
			To:   "0",
		},
		in: "packet", test: "TestForeignRemembered", says: "it was to find no entry",
	},
	{
		// Two flows have one source port.
		name: "NOEXIST left out where a port is claimed",
		Change: variant.Change{
			File: "lb/nat.h",
			From: "&c->key, &c->entry, BPF_NOEXIST",
			To:   "&c->key, &c->entry, 0",
		},
		in: "packet", test: "TestClaimsOfTwoCPUs", says: "both flows have", twoCPUs: true,
	},
	{
		// The second CPU's flow replaces the first one's, whose port stays claimed.
		name: "NOEXIST left out where a flow is made",
		Change: variant.Change{
			File: "lb/nat.h",
			From: "key, f, BPF_NOEXIST",
			To:   "key, f, 0",
		},
		in: "packet", test: "TestSameFirstPacketOnTwoCPUs", says: "one packet, two ways", twoCPUs: true,
	},
	{
		name: "NOEXIST left out where a flow is remembered",
		Change: variant.Change{
			File: "lb/place.h",
			From: "key, r, BPF_NOEXIST",
			To:   "key, r, 0",
		},
		in: "packet", test: "TestForeignRemembered", says: "it was to find no entry",
	},
	{
		name: "a claim kept though its flow is another CPU's",
		Change: variant.Change{
			File: "lb/nat.h",
			From: "\t\tbpf_map_delete_elem(&sh_flows, &c->key);\n\t\tif (flow_find(key, f))",
			To:   "\t\tif (flow_find(key, f))",
		},
		in: "packet", test: "TestSameFirstPacketOnTwoCPUs", says: "has a twin of another flow", twoCPUs: true,
	},
	{
		name: "the flow of another CPU that was first not used",
		Change: variant.Change{
			File: "lb/nat.h",
			From: "\t\tif (flow_find(key, f))\n\t\t\treturn REASON_NONE;\n",
			To:   "",
		},
		in: "packet", test: "TestSameFirstPacketOnTwoCPUs", says: "claim_race:", twoCPUs: true,
	},
	{
		name: "half a flow ended",
		Change: variant.Change{
			File: "lb/flow.h",
			From: "\ttwin = twin_end(key, copy);\n",
			To:   "\ttwin = 0;\n",
		},
		in: "packet", test: "TestHandshakeFlood", says: "table_full:",
	},
	{
		name: "an entry followed that is of another slot",
		Change: variant.Change{
			File: "lb/place.h",
			From: "copy->hash != placing->hash",
			To:   "0",
		},
		in: "packet", test: "TestAffinitySwitchedOn", says: `remembered is "flow C", want "client A"`,
	},
	{
		// Bytes of another version of the tool have an unknown meaning.
		name: "probes of any version stamped",
		Change: variant.Change{
			File: "core/probe.h",
			From: "head->version == PROBE_VERSION &&",
			To:   "1 &&",
		},
		in: stamping, test: "TestProbesAreStamped", says: "another version (-want +got)",
	},
	{
		name: "reports stamped as probes are",
		Change: variant.Change{
			File: "core/probe.h",
			From: "head->kind == PROBE_KIND_PROBE",
			To:   "1",
		},
		in: stamping, test: "TestProbesAreStamped", says: "a report (-want +got)",
	},
	{
		name: "fragments stamped",
		Change: variant.Change{
			File: "lb/stamping.h",
			From: "ip->frag_off & bpf_htons(IP4_FRAGMENT_BITS) ||",
			To:   "0 ||",
		},
		in: stamping, test: "TestProbesAreStamped", says: "a first fragment (-want +got)",
	},
	{
		// The answer's stamp takes the place of the probe's.
		name: "the direction of a probe of UDP not read",
		Change: variant.Change{
			File: "lb/stamping.h",
			From: "is_udp ? probe->head->is_answer & 1 :",
			To:   "is_udp ? 0 :",
		},
		in: stamping, test: "TestProbesAreStamped", says: "an answer to others (-want +got)",
	},
	{
		// The next packet on this CPU ends the stamp once more, with its own verdict and its own time.
		name: "the number of a run's stamp kept",
		Change: variant.Change{
			File: "lb/stamping.h",
			From: "\t*running = 0;\n",
			To:   "",
		},
		in: stamping, test: "TestProbesAreStamped", says: "behind a probe:",
	},
	{
		name: "the stamps of two CPUs counted once",
		Change: variant.Change{
			File: "lb/stamping.h",
			From: "__sync_fetch_and_add(count, 1) + 1",
			To:   "++*count",
		},
		in: stamping, test: "TestStampsOfTwoCPUs", says: "are missed", twoCPUs: true,
	},
}

// stamping is the package that tests stamps of probes.
const stamping = "../internal/lb/datapath/attach"

// TestBreakagesAreNoticed compiles each broken program and expects its test to fail. Without a fault,
// and compiled in the same way, all of the tests pass.
func TestBreakagesAreNoticed(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	if unchanged.Rests(t, "*.go", "../variant/*.go", "../packet/*.go", "../place/*.go", "../../internal/lb/datapath/attach/stamps*.go", "../../internal/kernel/stamps.go", "../../bpf/lb", "../../bpf/core", "../../bpf/toolchain", "../../bpf/compile") {
		return
	}
	dir := t.TempDir()
	tests := map[string][]string{}
	for _, b := range breakages {
		tests[b.in] = append(tests[b.in], b.test)
	}
	whole := compile(t, filepath.Join(dir, "whole"))
	for in := range tests {
		if out, err := exec.Command("go", "test", "-c", "-o", binary(dir, in), "../"+in).CombinedOutput(); err != nil {
			t.Fatalf("build the tests of test/%s: %v\n%s", in, err, out)
		}
		if out, err := run(dir, in, strings.Join(tests[in], "|"), whole); err != nil {
			t.Fatalf("with nothing broken, test/%s: %v\n%s", in, err, out)
		}
	}
	for _, b := range breakages {
		t.Run(b.name, func(t *testing.T) {
			if b.twoCPUs && runtime.NumCPU() < 2 {
				t.Skip("needs two CPUs: runs packets on both at once")
			}
			object := compile(t, filepath.Join(t.TempDir(), "broken"), b.Change)
			out, err := run(dir, b.in, b.test, object)
			switch {
			case err == nil:
				t.Errorf("%s of test/%s passes, although the program is broken", b.test, b.in)
			case !strings.Contains(out, "--- FAIL: "+b.test) || !strings.Contains(out, b.says):
				t.Errorf("%s of test/%s fails, but does not say %q: %v\n%s", b.test, b.in, b.says, err, out)
			}
		})
	}
}

// compile makes the XDP object from the sources with these changes, in a directory that it makes.
func compile(t *testing.T, dir string, changes ...variant.Change) (object string) {
	t.Helper()
	if err := variant.Sources("../../bpf", dir, changes...); err != nil {
		t.Fatal(err)
	}
	object = filepath.Join(dir, "xdp.o")
	variant.Compile(t, filepath.Join(dir, "lb", "xdp.bpf.c"), object)
	return object
}

// binary is the path of a package's test binary.
func binary(dir, in string) string { return filepath.Join(dir, filepath.Base(in)+".test") }

// run runs tests of a package with the program in the object.
func run(dir, in, tests, object string) (out string, err error) {
	command := exec.Command(binary(dir, in), "-test.run", "^("+tests+")$")
	command.Dir = "../" + in
	command.Env = append(os.Environ(), variant.Environment(object))
	text, err := command.CombinedOutput()
	return string(text), err
}
