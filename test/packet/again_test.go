package packet_test

import (
	"os"
	"os/exec"
	"testing"
)

// hookTests are the tests that also run at tc. The others are about tables of flows and slots,
// which know no hook, or about XDP alone.
const hookTests = "^Test(Forward|NewFlowsThatCannotBe|BackendIsItsOwnClient|" +
	"Direct|DirectExtensionHeaders|DirectChecksumThatLooksPartial|DirectCounts|DirectTTL|DirectCut|" +
	"Outer.*|TooBig.*|NoOuterSource|ErrorsToBackends|ErrorsToNoBackend|Errors|ErrorsOfNoFlow|Echo|TTL|ARP|ND|NotOurs|MappedAddresses|IPv4Options|" +
	"ExtensionHeaders|Reject|RejectHeaders|Fragments.*|AtomicFragments|Martians|Loop.*|" +
	"UDPZero|WrongChecksumStaysWrong|Truncated.*|Lies|DamagedForOthers|EthernetPadding|Host.*)$"

// TestAtTC runs the tests of packets once more, with worlds at tc.
func TestAtTC(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads BPF programs and makes network namespaces")
	}
	if *hook == "tc" {
		return // this is that run
	}
	self, err := os.Executable()
	must(t, err)
	arguments := []string{"-hook", "tc", "-test.run", hookTests}
	if testing.Verbose() {
		arguments = append(arguments, "-test.v")
	}
	run := exec.Command(self, arguments...)
	out, err := run.CombinedOutput()
	if err != nil {
		t.Errorf("%v: %v\n%s", run, err, out)
	} else if testing.Verbose() {
		t.Logf("%s", out)
	}
}
