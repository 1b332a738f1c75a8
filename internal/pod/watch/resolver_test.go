package watch_test

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/shunt-lb/shunt/internal/pod/shortcut"
)

// A resolver's questions of a pod, with the steer and without it, in turns. Every one is answered; the times are
// printed.
func TestResolver(t *testing.T) {
	s := newSteered(t, shortcut.Checked)
	families(t, func(t *testing.T, is6 bool) {
		s.is(is6, "taken")
		at := netip.AddrPortFrom(s.server.Address(is6), servicePort).String()
		p, err := s.server.ListenPacket("udp", at)
		s.must(err)
		server := &dns.Server{PacketConn: p, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
			a := new(dns.Msg)
			a.SetReply(q)
			a.Answer = []dns.RR{&dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 30}, A: []byte{192, 0, 2, 1}}}
			_ = w.WriteMsg(a)
		})}
		ended := make(chan error, 1)
		go func() { ended <- server.ActivateAndServe() }()
		var took [2][]time.Duration // without, with
		for round := range 6 {
			with := round % 2
			s.must(s.watch.SetSteers(s.steers[:len(s.steers)*with]))
			if with == 1 {
				s.is(is6, "taken")
			}
			steered := s.steer(is6).Counts["taken"].Packets + s.unwatched(is6)
			const questions = 100
			for range questions {
				ctx, cancel := context.WithTimeout(context.Background(), patience)
				begin := time.Now()
				c, err := s.Pods[0].Dial(ctx, "udp", at)
				s.must(err)
				q := new(dns.Msg)
				q.SetQuestion("example.test.", dns.TypeA)
				a, _, err := (&dns.Client{Timeout: patience}).ExchangeWithConnContext(ctx, q, &dns.Conn{Conn: c})
				took[with] = append(took[with], time.Since(begin))
				cancel()
				_ = c.Close()
				if err != nil || len(a.Answer) != 1 {
					t.Fatalf("a question is not answered: %v, %v", a, err)
				}
			}
			if n := s.steer(is6).Counts["taken"].Packets + s.unwatched(is6) - steered; with == 1 && n < questions {
				t.Errorf("%d packets of %d questions were steered", n, questions)
			}
		}
		s.must(server.Shutdown())
		s.must(<-ended)
		for with, all := range took {
			slices.Sort(all)
			t.Logf("steered: %v: median %s, 90%% %s, 99%% %s of %d questions", with == 1, all[len(all)/2], all[len(all)*9/10], all[len(all)*99/100], len(all))
		}
	})
}
