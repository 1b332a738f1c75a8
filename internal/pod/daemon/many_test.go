package daemon_test

import (
	"fmt"
	"net/netip"
	"testing"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/lab"
)

// A node with 250 pods has as many veths, each with the program: the limit of 64 interfaces is the balancer's alone. An emulated machine
// gets 80: it is too slow to look at 250 every second.
func TestNodeWithManyPods(t *testing.T) {
	const own = 2
	pods := 250
	if testing.Short() {
		pods = 80
	}
	w := newWorld(t, own, "accelerate: {}")
	crowd, err := w.Lab.AddHost("crowd") // is all other pods in one
	w.Must(err)
	for i := own; i < pods; i++ {
		address := netip.PrefixFrom(w.Address(i, false), 32)
		w.Must(w.Lab.Connect(lab.End{Host: w.Node, Interface: w.Interface(i)}, lab.End{Host: crowd, Interface: fmt.Sprintf("eth%d", i), IPv4: address}, lab.Cable{}))
		w.Must(w.Node.AddRoute(lab.Route{To: address, Interface: w.Interface(i)}))
	}
	w.run()
	st := w.Is("all pods take the shortcut", func(st *shuntv1.GetStatusResponse) bool {
		for i := range pods {
			if state(st, w.Interface(i)) != "taken" {
				return false
			}
		}
		return true
	})
	for i := range pods {
		if p := find(st, w.Interface(i)); p.Attached == "" {
			t.Errorf("the program is not at %s: %v", w.Interface(i), p)
		}
	}
	if p := st.Daemon.Products; len(p) != 1 || p[0].Does != fmt.Sprintf("accelerating %d of %[1]d pods, checked", pods) {
		t.Errorf("the products are %v", p)
	}
	c, s := w.connect(false)
	w.settle(c, s)
}
