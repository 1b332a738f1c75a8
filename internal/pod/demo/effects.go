package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/shunt-lb/shunt/internal/pod/plain"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
	"github.com/shunt-lb/shunt/internal/pod/watch"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// effects shows that the shortcut changes nothing that it must not change.
func (d *demo) effects(ctx context.Context) error {
	if _, _, err := d.use(ctx, vip, nil); err != nil {
		return err
	}
	_, nat, err := taken(d.checked, "nat")
	if err != nil {
		return err
	}
	d.Claim(nat > 0, "a connection to the service %s works: %d packets went through the translation", vip, nat)
	if err := d.closing(ctx); err != nil {
		return err
	}
	if err := d.ruleWhileFlowing(ctx); err != nil {
		return err
	}
	return d.shaping()
}

// closing looks at conntrack's entry of a connection that has ended.
func (d *demo) closing(ctx context.Context) error {
	c, err := d.dial(ctx, d.server.Address)
	if err != nil {
		return err
	}
	if err := settle(c, d.checked); err != nil {
		return errors.Join(err, c.Close())
	}
	client := c.LocalAddr().(*net.TCPAddr).Port
	open, err := d.left(client)
	if err != nil {
		return errors.Join(err, c.Close())
	}
	if err := end(c); err != nil {
		return err
	}
	closed, err := d.left(client)
	d.Claim(open > 60 && closed <= 10, "a closed connection leaves no entry behind: conntrack would keep it for %d s, and now for %d s", open, closed)
	return err
}

// left returns the number of seconds for which conntrack still keeps the entry of a client's port; 0
// without an entry.
func (d *demo) left(client int) (seconds uint32, err error) {
	err = d.bed.Node.Run(func() error {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		for _, f := range flows {
			if int(f.Forward.SrcPort) == client {
				seconds = f.TimeOut
			}
		}
		return err
	})
	return seconds, err
}

// ruleWhileFlowing inserts a rule that drops while a connection runs.
func (d *demo) ruleWhileFlowing(ctx context.Context) error {
	c, err := d.dial(ctx, d.server.Address)
	if err != nil {
		return err
	}
	defer c.Close() //nolint:errcheck // it is cut
	if err := settle(c, d.checked); err != nil {
		return err
	}
	var remove func() error
	err = d.bed.Node.Run(func() (err error) {
		remove, err = d.rules.Insert(plain.Destination(d.bed.Address(1, false)), plain.Drop())
		return err
	})
	if err != nil {
		return err
	}
	inserted := time.Now()
	s, err := d.await(d.checked, func(s watch.Status) bool { return s.Pods[0].State == shortcut.Rule.String() })
	if err != nil {
		return err
	}
	d.facts.Effect = float64(time.Since(inserted).Microseconds()) / 1000
	before, _, err := taken(d.checked, "")
	if err != nil {
		return err
	}
	_ = c.SetDeadline(time.Now().Add(100 * time.Millisecond))
	_, _ = c.Write([]byte{'r'})
	_, readErr := c.Read(make([]byte, 1))
	after, _, err := taken(d.checked, "")
	if err != nil {
		return err
	}
	d.Claim(readErr != nil && after == before, "a rule that drops packets, inserted during a connection, stopped it %.0f ms later", d.facts.Effect)
	d.Say("    %s is left alone: %s\n", s.Pods[0].Address, s.Pods[0].Why)
	if err := d.bed.Node.Run(remove); err != nil {
		return err
	}
	if _, err := d.await(d.checked, allTaken); err != nil {
		return err
	}
	err = ask(c)
	d.Claim(err == nil, "without the rule the same connection goes on")
	return nil
}

func allTaken(s watch.Status) bool {
	for _, p := range s.Pods {
		if p.State != shortcut.Taken.String() {
			return false
		}
	}
	return true
}

// await waits until the watch's status fulfils a condition.
func (d *demo) await(w *watch.Watch, ok func(watch.Status) bool) (s watch.Status, err error) {
	for end := time.Now().Add(patience); ; time.Sleep(2 * time.Millisecond) {
		if s, err = w.Status(); err != nil || ok(s) {
			return s, err
		}
		if time.Now().After(end) {
			return s, fmt.Errorf("the watch has not noticed a change within %s: %+v", patience, s.Pods)
		}
	}
}

// shaping gives a pod a bandwidth limit, as the plugin bandwidth of CNI does.
func (d *demo) shaping() error {
	qdisc := func(do func(netlink.Qdisc) error) error {
		return d.bed.Node.Run(func() error {
			link, err := netlink.LinkByName("veth2")
			if err != nil {
				return err
			}
			return do(&netlink.Tbf{
				QdiscAttrs: netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
				Rate:       6_250_000, Limit: 1 << 20, Buffer: 1 << 20,
			})
		})
	}
	if err := qdisc(netlink.QdiscAdd); err != nil {
		return err
	}
	s, err := d.await(d.checked, func(s watch.Status) bool { return !allTaken(s) })
	if err != nil {
		return err
	}
	last := s.Pods[len(s.Pods)-1]
	d.Claim(last.State == shortcut.Qdisc.String(), "a pod with a bandwidth limit of 50 Mbit/s is left alone: %s", last.Why)
	if err := qdisc(netlink.QdiscDel); err != nil {
		return err
	}
	_, err = d.await(d.checked, allTaken)
	return err
}
