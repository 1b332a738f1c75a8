package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	benchbed "github.com/shunt-lb/shunt/bench/bed"
	"github.com/shunt-lb/shunt/internal/cli"
	balancer "github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/internal/node"
	pod "github.com/shunt-lb/shunt/internal/pod/daemon"
	"github.com/spf13/cobra"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// line has `shunt run` for the balancer and the pod shortcut.
func line(s cli.Streams) *cobra.Command {
	return cli.Root(s, func() []node.Product { return []node.Product{balancer.Product(balancer.Options{}), pod.Product()} })
}

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) != "" {
		os.Exit(cli.Main(line, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// startPlain starts name servers without a cache, so that each question goes all the way.
func (w *world) startPlain() (stop func() error, err error) {
	var conns []net.PacketConn
	var running sync.WaitGroup
	stop = func() (err error) {
		for _, c := range conns {
			err = errors.Join(err, c.Close())
		}
		running.Wait()
		return err
	}
	for _, s := range w.servers() {
		c, err := s.host.ListenPacket("udp4", net.JoinHostPort(s.address.String(), "53"))
		if err != nil {
			return stop, err
		}
		conns = append(conns, c)
		running.Go(func() { s.serve(c) })
	}
	return stop, nil
}

// serve answers, or asks the server above, until the socket is closed.
func (s *server) serve(c net.PacketConn) {
	buffer := make([]byte, 1500)
	for {
		n, from, err := c.ReadFrom(buffer)
		if err != nil {
			return
		}
		var q dns.Msg
		if q.Unpack(buffer[:n]) != nil || len(q.Question) != 1 {
			continue
		}
		var m dns.Msg
		m.SetReply(&q)
		if s.upstream.IsValid() {
			if err := s.host.Run(func() error { _, err := ask(s.upstream, q.Question[0].Name[:len(q.Question[0].Name)-1]); return err }); err != nil {
				fmt.Fprintf(os.Stderr, "%s: %v\n", s.name, err)
				continue
			}
		}
		m.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 300}, A: net.IPv4(192, 0, 2, 1)}}
		if text, err := m.Pack(); err == nil {
			_, _ = c.WriteTo(text, from)
		}
	}
}

// translated is the number of connections that conntrack translates to an address of a world.
func (w *world) translated(cache string) (count int, err error) {
	err = w.Node.Run(func() error {
		flows, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
		for _, f := range flows {
			if f.Forward.DstIP.Equal(w.vip(cache).AsSlice()) {
				count++
			}
		}
		return err
	})
	return count, err
}

// With shunt, questions go from pod to cache to server past the host's rules, and conntrack translates none; without it, all go through both.
func TestQuestionsPassTheRules(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces and loads programs")
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	worlds, closeAll, err := newWorlds(ctx, (*world).startPlain, "/proc/self/exe")
	defer func() {
		if err := closeAll(); err != nil {
			t.Error(err)
		}
	}()
	if err != nil {
		t.Fatal(err)
	}
	for _, cache := range []string{"cache in a pod", "cache on the host"} {
		for _, w := range worlds {
			// Pods and steers are judged soon after shunt runs.
			settled := func() error {
				before, err := w.seen()
				if err != nil {
					return err
				}
				if _, err := w.askMany(w.vip(cache), 3, func() string { return "early.test" }); err != nil {
					return err
				}
				after, err := w.seen()
				if err == nil && after > before {
					err = fmt.Errorf("%d packets of 3 questions are forwarded", after-before)
				}
				return err
			}
			if w.way != byRules {
				if err := benchbed.Until(ctx, settled); err != nil {
					t.Errorf("%s, %s: %v", w.way, cache, err)
				}
			}
			const questions = 50
			number := 0
			before, err1 := w.seen()
			_, err2 := w.askMany(w.vip(cache), questions, func() string { number++; return fmt.Sprintf("n%d.test", number) })
			after, err3 := w.seen()
			translated, err4 := w.translated(cache)
			if err := errors.Join(err1, err2, err3, err4); err != nil {
				t.Fatalf("%s, %s: %v", w.way, cache, err)
			}
			t.Logf("%s, %s: %d questions, %d packets are forwarded, %d translated", w.way, cache, questions, after-before, translated)
			want := uint64(0)
			if w.way == byRules && cache == "cache in a pod" {
				want = 4 * questions // two legs, both ways
			}
			if after-before != want || (translated > 0) != (w.way == byRules) {
				t.Errorf("%s, %s: %d packets of %d questions are forwarded, want %d; conntrack translates %d", w.way, cache, after-before, questions, want, translated)
			}
		}
	}
}

func TestQuantile(t *testing.T) {
	all := []time.Duration{4, 1, 3, 2}
	for q, want := range map[float64]time.Duration{0: 1, 0.5: 3, 0.99: 4, 1: 4} {
		if is := quantile(all, q); is != want {
			t.Errorf("%v: %v, want %v", q, is, want)
		}
	}
}
