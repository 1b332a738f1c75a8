package resolve

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// resolver is a server of the DNS on loopback, over UDP and TCP.
type resolver struct {
	address string
	port    string
	answer  func(m *dns.Msg, question dns.Question, network string) // fills the answer
}

// serve starts a resolver at an address of loopback; port "" is any.
func serve(t *testing.T, address, port string, answer func(*dns.Msg, dns.Question, string)) *resolver {
	t.Helper()
	r := &resolver{address: address, answer: answer}
	udp, err := net.ListenPacket("udp", net.JoinHostPort(address, port))
	if err != nil {
		t.Fatal(err)
	}
	_, r.port, _ = net.SplitHostPort(udp.LocalAddr().String())
	tcp, err := net.Listen("tcp", net.JoinHostPort(address, r.port))
	if err != nil {
		t.Fatal(err)
	}
	handler := dns.HandlerFunc(func(w dns.ResponseWriter, asked *dns.Msg) {
		m := new(dns.Msg)
		m.SetReply(asked)
		r.answer(m, asked.Question[0], w.LocalAddr().Network())
		_ = w.WriteMsg(m) // a client that has given up does not read it
	})
	for _, server := range []*dns.Server{{PacketConn: udp, Handler: handler}, {Listener: tcp, Handler: handler}} {
		started := make(chan struct{})
		server.NotifyStartedFunc = func() { close(started) }
		go server.ActivateAndServe() //nolint:errcheck // it ends with the test
		<-started
		t.Cleanup(func() { _ = server.Shutdown() })
	}
	return r
}

// stubOf returns a stub that asks resolvers in their order, as a file with these lines says.
func stubOf(t *testing.T, port string, lines ...string) stub {
	t.Helper()
	path := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return stub{path: path, port: port}
}

// records parses lines of a zone file.
func records(t *testing.T, lines ...string) (all []dns.RR) {
	t.Helper()
	for _, line := range lines {
		record, err := dns.NewRR(line)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, record)
	}
	return all
}

// TestLookup: addresses and TTL of resolvers' answers, and the error if there are none.
func TestLookup(t *testing.T) {
	big := make([]string, 200)
	for i := range big {
		big[i] = fmt.Sprintf("big.example.org. 60 IN A 10.1.0.%d", i)
	}
	answers := map[string][]dns.RR{
		"web.example.org. A": records(t, "web.example.org. 300 IN A 10.0.0.3", "web.example.org. 200 IN A 10.0.0.2", "web.example.org. 300 IN A 10.0.0.3",
			"other.example.org. 5 IN A 10.0.0.66", "web.example.org. 5 IN TXT x"),
		"web.example.org. AAAA":    records(t, "web.example.org. 0 IN AAAA 2001:db8::2"),
		"alias.example.org. A":     records(t, "real.example.net. 600 IN A 10.0.0.9", "middle.example.org. 30 IN CNAME real.example.net.", "Alias.example.org. 90 IN CNAME middle.example.org."),
		"loop.example.org. A":      records(t, "loop.example.org. 90 IN CNAME loop.example.org."),
		"big.example.org. A":       records(t, big...),
		"short.corp.example. A":    records(t, "short.corp.example. 60 IN A 10.0.0.4"),
		"weeks.example.org. A":     records(t, "weeks.example.org. 1000000 IN A 10.0.0.5"),
		"mapped.example.org. AAAA": records(t, "mapped.example.org. 60 IN AAAA ::ffff:10.0.0.6"),
	}
	answer := func(m *dns.Msg, q dns.Question, network string) {
		name := q.Name + " " + dns.TypeToString[q.Qtype]
		m.Answer = answers[name]
		switch {
		case strings.HasPrefix(name, "broken."):
			m.Rcode = dns.RcodeServerFailure
		case strings.HasPrefix(name, "other-question."):
			m.Question[0].Name = "x."
		case strings.HasPrefix(name, "cut."):
			m.Truncated = true
		case name == "web.example.org. A" || m.Answer != nil:
		case strings.HasPrefix(name, "empty."):
			m.Ns = records(t, "example.org. 3600 IN SOA ns.example.org. admin.example.org. 1 2 3 4 45")
		case strings.HasPrefix(name, "bare."):
		default:
			m.Rcode = dns.RcodeNameError
		}
		if network == "udp" && m.Len() > payloadMax {
			m.Truncate(payloadMax)
		}
	}
	r := serve(t, "127.0.0.1", "", answer)
	refuses := serve(t, "127.0.0.2", r.port, func(m *dns.Msg, _ dns.Question, _ string) { m.Rcode = dns.RcodeRefused })
	s := stubOf(t, r.port, "nameserver "+r.address, "search corp.example", "options attempts:1 timeout:5")
	second := stubOf(t, r.port, "nameserver "+refuses.address, "nameserver "+r.address)
	for _, c := range []struct {
		stub stub
		name string
		of   Family
		want string // addresses and TTL, or the error
	}{
		{s, "web.example.org", IPv4, "[10.0.0.2 10.0.0.3] 3m20s"},
		{s, "WEB.example.org.", IPv4, "the name does not exist"}, // the zone of this test knows lower case alone
		{s, "web.example.org", IPv6, "[2001:db8::2] 1s"},
		{s, "alias.example.org", IPv4, "[10.0.0.9] 30s"},
		{s, "alias.example.org", IPv6, "the name does not exist (NXDOMAIN)"},
		{s, "loop.example.org", IPv4, "[] 30s"},
		{s, "short", IPv4, "[10.0.0.4] 1m0s"},
		{s, "short.", IPv4, "NXDOMAIN"},
		{s, "weeks.example.org", IPv4, "[10.0.0.5] 24h0m0s"},
		{s, "empty.example.org", IPv4, "[] 45s"},
		{s, "bare.example.org", IPv4, "[] 30s"},
		{s, "mapped.example.org", IPv6, "[] 30s"},
		{s, "broken.example.org", IPv4, "resolver 127.0.0.1: SERVFAIL"},
		{s, "other-question.example.org", IPv4, "resolver 127.0.0.1: it answered another question"},
		{s, "cut.example.org", IPv4, "resolver 127.0.0.1: its answer is cut off over TCP, too"},
		{second, "web.example.org", IPv4, "[10.0.0.2 10.0.0.3] 3m20s"},
		{stubOf(t, r.port, "nameserver "+refuses.address), "web.example.org", IPv4, "resolver 127.0.0.2: REFUSED"},
		{stubOf(t, r.port, "nameserver 127.0.0.3"), "web.example.org", IPv4, "resolver 127.0.0.3: connection refused"},
		{stubOf(t, r.port, "options attempts:1"), "web.example.org", IPv4, "names no resolver"},
		{stub{path: "/nonexistent"}, "web.example.org", IPv4, "read the resolvers: open /nonexistent: no such file or directory"},
	} {
		got, err := c.stub.lookup(t.Context(), Question{c.name, c.of})
		text := fmt.Sprint(got.addresses, " ", got.ttl)
		if err != nil {
			text = err.Error()
		}
		if !strings.Contains(text, c.want) {
			t.Errorf("%s, IPv%d: %s, want %s", c.name, c.of, text, c.want)
		}
	}
	got, err := s.lookup(t.Context(), Question{"big.example.org", IPv4})
	if err != nil || len(got.addresses) != len(big) || got.addresses[1] != netip.MustParseAddr("10.1.0.1") {
		t.Errorf("over TCP there are %d addresses, %v; want %d", len(got.addresses), err, len(big))
	}
}

// TestSilentResolver: a resolver that answers nothing, or nonsense, costs its timeout; a lookup that is not wanted any
// more costs nothing.
func TestSilentResolver(t *testing.T) {
	for what, says := range map[string][]byte{"nothing": nil, "nonsense": []byte("hello")} {
		conn, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
		asked := make(chan struct{}, 16)
		go func() {
			for buffer := make([]byte, 1500); ; {
				_, from, err := conn.ReadFrom(buffer)
				if err != nil {
					return
				}
				asked <- struct{}{}
				if says != nil {
					_, _ = conn.WriteTo(says, from)
				}
			}
		}()
		_, port, _ := net.SplitHostPort(conn.LocalAddr().String())
		s := stubOf(t, port, "nameserver 127.0.0.1", "options attempts:1 timeout:1")
		if _, err := s.lookup(t.Context(), web); err == nil || what == "nothing" && !strings.Contains(err.Error(), "resolver 127.0.0.1: no answer within 1s") {
			t.Errorf("a resolver that says %s: %v", what, err)
		}
		<-asked
		if says != nil {
			continue
		}
		s = stubOf(t, port, "nameserver 127.0.0.1", "options timeout:3600")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() {
			_, err := s.lookup(ctx, web)
			ended <- err
		}()
		<-asked
		cancel()
		select {
		case err := <-ended:
			if err == nil {
				t.Error("there is an answer")
			}
		case <-time.After(time.Minute):
			t.Fatal("the lookup goes on after its context has ended")
		}
	}
}

// FuzzRead reads any answer, and expects addresses, each once, that hold for a bounded time.
func FuzzRead(f *testing.F) {
	m := new(dns.Msg)
	m.SetQuestion("web.example.org.", dns.TypeA)
	for _, line := range []string{"web.example.org. 300 IN A 10.0.0.3", "web.example.org. 3 IN CNAME web.example.org.", "web.example.org. 3 IN AAAA 2001:db8::1"} {
		record, err := dns.NewRR(line)
		if err != nil {
			f.Fatal(err)
		}
		m.Answer = append(m.Answer, record)
	}
	packed, err := m.Pack()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(packed)
	f.Fuzz(func(t *testing.T, packed []byte) {
		m := new(dns.Msg)
		if m.Unpack(packed) != nil {
			return
		}
		for _, kind := range types {
			r := read(m, "web.example.org.", kind)
			if r.ttl < ttlMin || r.ttl > ttlMax {
				t.Errorf("TTL %s", r.ttl)
			}
			for i, a := range r.addresses {
				if !a.IsValid() || a.Is4In6() || i > 0 && !r.addresses[i-1].Less(a) {
					t.Errorf("addresses %v", r.addresses)
				}
			}
		}
	})
}
