package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/pod/sockets"
	"github.com/shunt-lb/shunt/internal/pod/traffic"
	"github.com/vishvananda/netlink"
)

const (
	proxyRounds   = 5
	proxyRequests = 300 // of each round and way
	messageSize   = 512 // bytes of a request, and of an answer
)

// chain is a client, a proxy and a server on the loopback interface of a pod: a client's connection and the proxy's own.
type chain struct {
	client net.Conn
	all    []net.Conn
}

// newChain connects the three. Proxy and server end when the client does.
func newChain(in traffic.Namespace) (c *chain, err error) {
	c = &chain{}
	connect := func() (a, b net.Conn, err error) {
		err = in.Run(func() error {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				return err
			}
			defer l.Close() //nolint:errcheck // it has accepted
			if a, err = net.DialTimeout("tcp", l.Addr().String(), patience); err != nil {
				return err
			}
			c.all = append(c.all, a)
			if b, err = l.Accept(); err == nil {
				c.all = append(c.all, b)
			}
			return err
		})
		return a, b, err
	}
	client, front, err := connect()
	if err != nil {
		return c, errors.Join(err, c.close())
	}
	back, server, err := connect()
	if err != nil {
		return c, errors.Join(err, c.close())
	}
	c.client = client
	// io.Copy would use splice, which does not work with paired sockets; wrapped like this it reads and writes.
	for _, way := range [][2]net.Conn{{front, back}, {back, front}, {server, server}} {
		go io.Copy(struct{ io.Writer }{way[1]}, struct{ io.Reader }{way[0]}) //nolint:errcheck // it ends with the connections
	}
	return c, nil
}

func (c *chain) close() error {
	var errs []error
	for _, one := range c.all {
		errs = append(errs, one.Close())
	}
	return errors.Join(errs...)
}

// ask sends requests one after the other, and returns the time that took.
func (c *chain) ask(requests int) (time.Duration, error) {
	message := make([]byte, messageSize)
	begin := time.Now()
	for range requests {
		if err := c.client.SetDeadline(time.Now().Add(patience)); err != nil {
			return 0, err
		}
		if _, err := c.client.Write(message); err != nil {
			return 0, err
		}
		if _, err := io.ReadFull(c.client, message); err != nil {
			return 0, err
		}
	}
	return time.Since(begin), nil
}

// looped returns the number of packets that have gone through the loopback interface of the first pod.
func (d *demo) looped() (packets uint64, err error) {
	err = d.bed.Pods[0].Run(func() error {
		lo, err := netlink.LinkByName("lo")
		if err == nil {
			packets = lo.Attrs().Statistics.TxPackets
		}
		return err
	})
	return packets, err
}

// socketPairs shows a proxy and its server whose sockets hand each other their data.
func (d *demo) socketPairs(context.Context) (err error) {
	if err := d.bed.Pods[0].SetUp("lo", true); err != nil {
		return err
	}
	var checks []sockets.Check
	if err := d.bed.Pods[0].Run(func() (err error) { checks, err = sockets.Test(); return err }); err != nil {
		return err
	}
	d.Say("  experimental; this kernel's behaviour with paired sockets, tested now:\n")
	for _, c := range checks {
		result := "right"
		if c.Broken != "" {
			result = "broken: " + c.Broken
		}
		d.Say("    %-11s %s\n", c.Name, result)
	}
	d.Say("\n")
	bad := sockets.Bad(checks, sockets.Waivable())
	d.facts.Sockets = checks
	if len(bad) > 0 {
		d.Claim(true, "`shunt run` refuses to pair sockets on this kernel: it breaks %s", bad[0].Name)
		return nil
	}
	before, err := newChain(d.bed.Pods[0]) // connected before the programs are attached
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, before.close()) }()
	cgroup, leave, err := lab.EnterCgroup("shunt-" + d.facts.ID)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, leave()) }()
	pairs, err := sockets.Open(sockets.Options{Cgroups: []string{cgroup}, Limit: sockets.LimitDefault})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pairs.Close()) }()
	return d.useProxy(before, pairs)
}

// useProxy compares a chain that is not paired with one that is.
func (d *demo) useProxy(plain *chain, pairs *sockets.Sockets) error {
	paired, err := newChain(d.bed.Pods[0])
	if err != nil {
		return err
	}
	defer paired.close() //nolint:errcheck // of the demo
	number, _, err := pairs.Paired()
	if err != nil {
		return err
	}
	d.Claim(number == 4, "client → proxy → server on loopback: 4 sockets are made in the cgroup, %d are paired; earlier sockets are left alone", number)
	if _, err := paired.ask(10); err != nil {
		return err
	}
	var times [2]time.Duration
	var loops [2]uint64
	for range proxyRounds {
		for i, c := range []*chain{plain, paired} {
			from, err := d.looped()
			if err != nil {
				return err
			}
			took, err := c.ask(proxyRequests)
			if err != nil {
				return fmt.Errorf("requests through the proxy: %w", err)
			}
			to, err := d.looped()
			if err != nil {
				return err
			}
			times[i] += took
			loops[i] += to - from
		}
	}
	counts, err := pairs.Counts()
	if err != nil {
		return err
	}
	const requests = proxyRounds * proxyRequests
	d.Claim(loops[0] >= 4*requests && loops[1] < requests/10, "%d requests through the proxy: the loopback interface carries %d packets of the plain sockets, %d of the paired ones", requests, loops[0], loops[1])
	d.Claim(counts["taken"].Packets >= 4*requests, "%d messages went from socket to socket", counts["taken"].Packets)
	each := func(i int) float64 { return float64(times[i].Microseconds()) / requests }
	d.facts.ProxyPlain, d.facts.ProxyPaired = each(0), each(1)
	d.Say("    a request takes %.1f µs, paired %.1f µs; figures are shown, not claimed\n", each(0), each(1))
	stay, err := pairs.Shut(patience)
	if err != nil {
		return err
	}
	_, err = paired.ask(100)
	d.Claim(stay == 0 && err == nil, "the pairs are taken apart, and the same connections go on by TCP")
	return nil
}
