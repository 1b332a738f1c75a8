package net

import (
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/test/stranger"
)

// TestOccupiedInterface: `check` and `run` name a foreign program on the interface, and the
// remedy in their message works.
func TestOccupiedInterface(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm})
	b.write(b.file(settings{}))
	name := b.Balancer.Interfaces()[0].Name
	pass := stranger.Pass(t, "not_shunt")
	attach := func(fd int) {
		t.Helper()
		err := b.Balancer.Run(func() error {
			dev, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			return netlink.LinkSetXdpFdWithFlags(dev, fd, 1<<2) // XDP_FLAGS_DRV_MODE of linux/if_link.h
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	attach(pass.FD())
	const whose, remedy = `"not_shunt" (program `, "xdpdrv off`"
	for _, args := range [][]string{{"check", "--host", "--config", b.path}, {"run", "--config", b.path, "--instance", b.instance, "--socket", b.socket}} {
		code, out := b.shunt(args...)
		if code != 1 || !strings.Contains(out, whose) || !strings.Contains(out, "ip link set dev "+name+" "+remedy) || !strings.Contains(out, "uid 0") {
			t.Errorf("shunt %s: exit code %d, want 1 and whose program it is:\n%s", args[0], code, out)
		}
		t.Logf("shunt %s:\n%s", args[0], out)
	}
	if code, out := b.shunt("check", "--config", b.path); code != 0 || !strings.Contains(out, "warning: interfaces[0].name") {
		t.Errorf("shunt check without --host: exit code %d, want 0 and a warning:\n%s", code, out)
	}
	attach(-1)
	b.start()
	if code, out := b.shunt("check", "--host", "--config", b.path); strings.Contains(out, "XDP program") {
		t.Errorf("shunt check beside a running shunt: exit code %d:\n%s", code, out)
	}
	for _, vip := range vips {
		if _, err := b.get(b.Client.HTTPClient(false), at(vip, 80)); err != nil {
			t.Error(err)
		}
	}
}
