package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/udp/broker"
	"github.com/shunt-lb/shunt/internal/udp/xsk"
	"github.com/shunt-lb/shunt/udp"
)

const (
	workFor   = 50 * time.Microsecond
	capacity  = float64(time.Second / workFor) // datagrams a second, if receiving cost nothing
	batchSize = 16
	kernel    = "kernel's socket"
	basePort  = 5000 // of the kernel's socket; the leases' follow
)

var (
	loads  = []float64{0.25, 0.5, 0.75, 0.9, 1.1, 1.5, 2} // of capacity
	bounds = []time.Duration{5 * time.Millisecond, 20 * time.Millisecond, 80 * time.Millisecond}
)

func bounded(d time.Duration) string { return "ring for " + d.String() }

// receivers are the names of all, in the order of the report.
func receivers() []string {
	all := []string{kernel}
	for _, d := range bounds {
		all = append(all, bounded(d))
	}
	return all
}

// result is one run of one receiver.
type result struct {
	Offered, Delivered float64 // datagrams a second
	P50, P99           time.Duration
	Lost               int64 // datagrams that no counter knows
}

type bed struct {
	lab            *lab.Lab
	client, server *lab.Host
	broker         *broker.Broker
	folder, socket string
	began          time.Time // of the times in datagrams
}

func newBed(ctx context.Context) (b *bed, err error) {
	b = &bed{began: time.Now()}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.close())
		}
	}()
	if b.folder, err = os.MkdirTemp("", "shunt-overload-"); err != nil {
		return b, err
	}
	if b.lab, err = lab.New(""); err != nil {
		return b, err
	}
	if b.client, err = b.lab.AddHost("client"); err != nil {
		return b, err
	}
	if b.server, err = b.lab.AddHost("server"); err != nil {
		return b, err
	}
	err = b.lab.Connect(lab.End{Host: b.client, Interface: "eth0", IPv4: netip.MustParsePrefix("192.0.2.1/24")},
		lab.End{Host: b.server, Interface: "eth0", IPv4: netip.MustParsePrefix("192.0.2.10/24")}, lab.Cable{Queues: 1})
	if err != nil {
		return b, err
	}
	b.socket = filepath.Join(b.folder, "s")
	if b.broker, err = broker.Open(broker.Options{Socket: b.socket, In: b.server.Run}); err != nil {
		return b, err
	}
	root := uint32(0)
	var offers []broker.Offer
	for i, d := range bounds {
		offers = append(offers, broker.Offer{Name: bounded(d), Interface: "eth0", Addresses: []netip.AddrPort{address(1 + i)}, Mode: xsk.Auto,
			RingSize: xsk.RingSize(d, capacity), Allow: []broker.Rule{{User: &root}}})
	}
	if err := b.broker.Apply(offers); err != nil {
		return b, err
	}
	return b, b.lab.Ready(ctx)
}

func address(index int) netip.AddrPort {
	return netip.AddrPortFrom(netip.MustParseAddr("192.0.2.10"), uint16(basePort+index))
}

func (b *bed) close() error {
	var errs []error
	if b.broker != nil {
		errs = append(errs, b.broker.Close())
	}
	if b.lab != nil {
		errs = append(errs, b.lab.Close())
	}
	return errors.Join(append(errs, os.RemoveAll(b.folder))...)
}

// taker gives each datagram that comes to work, and returns once the time is over.
type taker func(until time.Time, work func(payload []byte)) error

// measure offers a load to a receiver for a while. The first quarter is not measured: the queue fills up.
func (b *bed) measure(ctx context.Context, name string, load float64, each time.Duration) (r result, err error) {
	index := slices.Index(receivers(), name)
	conn, err := b.client.Dial(ctx, "udp", address(index).String())
	if err != nil {
		return r, err
	}
	defer conn.Close() //nolint:errcheck // the end of the load; all is sent
	take, end, err := b.receiver(ctx, name, index)
	if err != nil {
		return r, err
	}
	begin := time.Now()
	until := begin.Add(each)
	sent := make(chan int)
	go func() { sent <- b.send(conn, load*capacity, until) }()
	var delays []time.Duration
	err = take(until, func(payload []byte) {
		now := time.Now()
		if len(payload) >= 8 && now.After(begin.Add(each/4)) {
			delays = append(delays, now.Sub(b.began)-time.Duration(binary.LittleEndian.Uint64(payload)))
		}
		for time.Since(now) < workFor { //nolint:revive // this is the work
		}
	})
	r.Offered = float64(<-sent) / each.Seconds()
	lost, endErr := end()
	if err = errors.Join(err, endErr); err != nil {
		return r, err
	}
	if len(delays) == 0 {
		return r, errors.New("no datagram has arrived")
	}
	slices.Sort(delays)
	r.P50, r.P99, r.Lost = delays[len(delays)/2], delays[len(delays)*99/100], lost
	r.Delivered = float64(len(delays)) / (each * 3 / 4).Seconds()
	return r, nil
}

// send sends at a rate until a time, on a thread of its own, and returns the number of datagrams.
func (b *bed) send(conn net.Conn, rate float64, until time.Time) (sent int) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	payload := make([]byte, 64)
	for begin := time.Now(); time.Now().Before(until); {
		if time.Since(begin).Seconds()*rate < float64(sent) {
			continue
		}
		binary.LittleEndian.PutUint64(payload, uint64(time.Since(b.began)))
		if _, err := conn.Write(payload); err == nil {
			sent++
		}
	}
	return sent
}

// receiver returns one of receivers, and its end, which returns the number of datagrams that nobody
// counted.
func (b *bed) receiver(ctx context.Context, name string, index int) (taker, func() (int64, error), error) {
	if name == kernel {
		conn, err := b.server.ListenPacket("udp", address(index).String())
		if err != nil {
			return nil, nil, err
		}
		return ofKernel(conn.(*net.UDPConn)), func() (int64, error) { return 0, conn.Close() }, nil
	}
	l, err := udp.Open(ctx, udp.Options{Socket: b.socket, Name: name, Spin: 50 * time.Microsecond})
	if err != nil {
		return nil, nil, err
	}
	return ofLease(l), func() (int64, error) { return b.end(l, name) }, nil
}

// end closes a lease, and asks the broker for its account once that is over.
func (b *bed) end(l *udp.Lease, name string) (int64, error) {
	if err := l.Close(); err != nil {
		return 0, err
	}
	for begin := time.Now(); time.Since(begin) < 10*time.Second; time.Sleep(time.Millisecond) {
		for _, o := range b.broker.Status().Offers {
			if over := o.Ended["closed"] + o.Ended["died"]; o.Name == name && o.Lease == nil && over == o.Given {
				return o.Past.Lost(), nil
			}
		}
	}
	return 0, fmt.Errorf("the lease of %s does not end", name)
}

func ofKernel(conn *net.UDPConn) taker {
	return func(until time.Time, work func([]byte)) error {
		buffer := make([]byte, 2048)
		for time.Now().Before(until) {
			if err := conn.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
				return err
			}
			for time.Now().Before(until) {
				n, _, err := conn.ReadFromUDPAddrPort(buffer)
				if errors.Is(err, os.ErrDeadlineExceeded) {
					break
				}
				if err != nil {
					return err
				}
				work(buffer[:n])
			}
		}
		return nil
	}
}

func ofLease(l *udp.Lease) taker {
	return func(until time.Time, work func([]byte)) error {
		batch := make([]udp.Descriptor, batchSize)
		q := l.Queues[0]
		for time.Now().Before(until) {
			if _, err := l.Wait(10 * time.Millisecond); err != nil {
				return err
			}
			n := q.Receive(batch)
			for i := range batch[:n] {
				p, err := q.Packet(&batch[i])
				if err != nil {
					return err
				}
				work(p.Payload)
			}
			q.Release(batch[:n])
			if err := errors.Join(q.Err(), l.Err()); err != nil {
				return err
			}
		}
		return nil
	}
}
