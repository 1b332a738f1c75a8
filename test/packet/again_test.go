package packet_test

import (
	"os"
	"os/exec"
	"testing"

	"github.com/shunt-lb/shunt/test/unchanged"
)

// hookTests are the tests that also run at tc and behind VLAN tags. The others are about tables of
// flows and slots, which do not depend on the hook, or about XDP alone.
const hookTests = "^Test(Forward|NewFlowsThatCannotBe|BackendIsItsOwnClient|" +
	"Direct|DirectExtensionHeaders|DirectChecksumThatLooksPartial|DirectCounts|DirectTTL|DirectCut|" +
	"Outer.*|TooBig.*|NoOuterSource|ErrorsToBackends|ErrorsToNoBackend|Errors|ErrorsOfNoFlow|Echo|TTL|ARP|ND|NotOurs|MappedAddresses|IPv4Options|" +
	"ExtensionHeaders|Reject|RejectHeaders|Fragments.*|AtomicFragments|Martians|Loop.*|" +
	"UDPZero|WrongChecksumStaysWrong|Truncated.*|Lies|DamagedForOthers|EthernetPadding|Host.*)$"

// directTests are the tests that send to services with direct return. Most others use NAT alone, and
// run once more with a program that has no other feature.
const directTests = "^Test(AffinityDraining.*|AffinitySwitchedOn|AtomicFragments|Budget|Direct.*|ErrorsFollowFlows|ErrorsOfAFleet|" +
	"ErrorsThatMayNotBeSent|ErrorsTo.*|Flood.*|ForeignRemembered|FragmentsStayWithTheFirst|HashOf.*|Loop.*|Martian.*|" +
	"NoOuterSource|Outer.*|Place|PreviousBefore.*|Reject|RejectHeaders|RejectBesideDrainingFlows|Remembered.*|Scan.*|SourceRate|Sources.*|" +
	"SpoofedSources|StoryOfASlot|TableFull|TooBig|Truncated)$"

// mixedTests compare the two, or need flows of both.
const mixedTests = "^(Test(AffinitySlots|DeniedMeanwhile|DirectFrontends|FragmentNotesAge|FragmentsInAnyOrder|FragmentsThatEndHere|FragmentsThatLie|" +
	"RejectOfAFlow|SegmentsAreBounded)|Fuzz.*)$"

// TestAgain runs tests of packets once more: with worlds at tc, with frames that have VLAN tags, and
// with programs that have only the features that NAT or direct return needs, as most users' have.
func TestAgain(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	if *hook != "xdp" || *forwarding != "all" {
		return // this is such a run
	}
	// The same packets, and other ways to load and attach the same programs: only changes of these
	// files change the result. A virtual machine has the binary alone, and another kernel.
	if !testing.Short() && unchanged.Rests(t, "*.go", "../../internal/packet/*.go", "../../internal/lb/datapath/*.go", "../../internal/lb/reconcile/*.go", "../../internal/kernel/*.go",
		"../../bpf/lb", "../../bpf/core", "../../bpf/ctx", "../../bpf/toolchain", "../../bpf/compile") {
		return
	}
	self, err := os.Executable()
	must(t, err)
	for _, run := range []struct {
		name      string
		short     string // the tests for -short: under an emulated kernel each takes the verifier some seconds
		arguments []string
	}{
		{"at tc", "Forward|Direct|Errors|Reject|FragmentsThroughNAT", []string{"-hook", "tc", "-test.run", hookTests}},
		{"behind VLAN tags", "Forward|Direct|Errors|Reject|ARP|ND", []string{"-hook", "vlan", "-test.run", hookTests, "-test.skip", "^Test(Host.*|LoopEndsByTTL|DirectTTL)$"}},
		{"NAT alone", "Forward|Errors|FragmentsThroughNAT", []string{"-services", "nat", "-test.skip", directTests + "|" + mixedTests}},
		{"direct return alone", "Direct|Reject", []string{"-services", "direct", "-test.run", directTests, "-test.skip", mixedTests}},
	} {
		t.Run(run.name, func(t *testing.T) {
			t.Parallel()
			if testing.Short() {
				run.arguments = append(run.arguments, "-test.run", "^Test("+run.short+")$") // the last one counts
			}
			if testing.Verbose() {
				run.arguments = append(run.arguments, "-test.v")
			}
			command := exec.Command(self, run.arguments...)
			out, err := command.CombinedOutput()
			if err != nil {
				t.Errorf("%v: %v\n%s", command, err, out)
			} else if testing.Verbose() {
				t.Logf("%s", out)
			}
		})
	}
}
