package tidy

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// balancers are the folders of the balancer's tests, besides those in internal/lb.
var balancers = []string{"test/broken", "test/differential", "test/load", "test/net", "test/packet", "test/place", "test/script"}

// beside has packages whose tests run another product beside their own.
var beside = map[string]string{"internal/pod/daemon": "udp"}

// besideBalancer are the packages of other products whose tests run the balancer, or the whole command line.
var besideBalancer = []string{"internal/diag/demo", "internal/guard/demo", "internal/pod/daemon", "internal/pod/demo", "internal/udp/daemon", "internal/udp/demo"}

// TestTestsLinkTheirProduct: the tests of a product link no other product, so that they rest while only others change
// (test/rest). A test of two products has a package of its own, as test/stamps.
func TestTestsLinkTheirProduct(t *testing.T) {
	output, err := exec.Command("go", "list", "-C", root, "-test", "-f", `{{.ImportPath}} {{join .Deps " "}}`, "./internal/...", "./test/...").Output()
	if err != nil {
		t.Fatalf("list what tests are built of: %v", err)
	}
	seen := map[string]int{}
	for line := range strings.Lines(string(output)) {
		words := strings.Fields(line)
		name, isTest := strings.CutSuffix(strings.TrimPrefix(words[0], module), ".test")
		own := productTested(name)
		if !isTest || own == "" {
			continue
		}
		seen[own]++
		for _, other := range linked(words[1:]) {
			if other != own && other != beside[name] && (other != "lb" || !slices.Contains(besideBalancer, name)) {
				t.Errorf("the tests of %s are of the product %s, and link %s: they run when that changes", name, own, other)
			}
		}
	}
	for _, product := range products {
		if seen[product] == 0 {
			t.Errorf("no tests of the product %s were found", product)
		}
	}
}

// productTested is the product of a package's tests; "": several, or none.
func productTested(name string) string {
	if slices.Contains(balancers, name) {
		return "lb"
	}
	return of(name)
}

// linked are the products among packages, in order.
func linked(packages []string) (all []string) {
	for _, name := range packages {
		if ours, is := strings.CutPrefix(name, module); is && of(ours) != "" {
			all = append(all, of(ours))
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}
