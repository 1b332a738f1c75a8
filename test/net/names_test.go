package net

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/shunt-lb/shunt/internal/lab"
)

// zone is a resolver that knows the addresses of one name.
type zone struct {
	mu        sync.Mutex
	addresses []netip.Addr
	rcode     int
	silent    bool
}

// set makes these the addresses, for a second each.
func (z *zone) set(addresses ...netip.Addr) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.addresses, z.rcode = addresses, dns.RcodeSuccess
}

// fail makes the resolver answer with SERVFAIL.
func (z *zone) fail() {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.rcode = dns.RcodeServerFailure
}

// silence makes the resolver answer no more.
func (z *zone) silence() {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.silent = true
}

// ServeDNS implements dns.Handler.
func (z *zone) ServeDNS(w dns.ResponseWriter, asked *dns.Msg) {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.silent {
		return
	}
	m := new(dns.Msg)
	m.SetRcode(asked, z.rcode)
	header := dns.RR_Header{Name: asked.Question[0].Name, Rrtype: asked.Question[0].Qtype, Class: dns.ClassINET, Ttl: 1}
	for _, a := range z.addresses {
		switch {
		case z.rcode != dns.RcodeSuccess:
		case a.Is4() && header.Rrtype == dns.TypeA:
			m.Answer = append(m.Answer, &dns.A{Hdr: header, A: a.AsSlice()})
		case a.Is6() && header.Rrtype == dns.TypeAAAA:
			m.Answer = append(m.Answer, &dns.AAAA{Hdr: header, AAAA: a.AsSlice()})
		}
	}
	_ = w.WriteMsg(m) // after a lost answer the client asks again
}

// serveZone starts a resolver on a host, and returns a resolv.conf that names it.
func serveZone(t *testing.T, h *lab.Host, z *zone) (path string) {
	t.Helper()
	conn, err := h.ListenPacket("udp", at(h.Addr4(), 53))
	if err != nil {
		t.Fatal(err)
	}
	server := &dns.Server{PacketConn: conn, Handler: z}
	ended := make(chan error, 1)
	go func() { ended <- server.ActivateAndServe() }()
	t.Cleanup(func() {
		_ = conn.Close() // this ends the server
		<-ended
	})
	path = filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(path, []byte(fmt.Sprintf("nameserver %s\noptions timeout:3 attempts:1\n", h.Addr4())), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// startWith is start with another resolv.conf than the machine's.
func (b *bed) startWith(t *testing.T, resolvers string) {
	t.Helper()
	plain := command(b.Balancer, "run", "--config", b.path, "--instance", b.instance, "--socket", b.socket)
	script := `mount --bind "$0" /etc/resolv.conf && exec "$@"`
	c := b.Balancer.Command(t.Context(), "unshare", append([]string{"--mount", "--propagation", "slave", "sh", "-c", script, resolvers}, plain.Args...)...)
	c.Env = append(plain.Env, b.env...)
	b.daemon = starts(t, c)
	b.awaits(b.daemon, "msg=running")
}

// holds waits for a condition with this text, or for the condition's end if the text is empty.
func (b *bed) holds(t *testing.T, code, text string) {
	t.Helper()
	eventually(t, 30*time.Second, fmt.Sprintf("condition %s %q", code, text), func() error {
		if is := b.status().condition(code); (text == "") != (is == "") || !strings.Contains(is, text) {
			return errors.New(is)
		}
		return nil
	})
}

// TestNames: backends follow the DNS as it changes. Connections to a removed address stay; a resolver
// that fails changes nothing, also over a restart.
func TestNames(t *testing.T) {
	b := newBed(t, lab.Options{Layout: lab.OneArm, Backends: 2})
	one, two := b.Backends[0], b.Backends[1]
	z := &zone{}
	resolvers := serveZone(t, b.Client, z)
	z.fail()
	file := strings.ReplaceAll(b.file(settings{backends: []int{1}}), fmt.Sprintf("{address: %s, port: ", one.Addr4()), "{dns: web.example.org, max: 2, port: ")
	file = strings.Join(withoutLines(file, fmt.Sprintf("address: %q", one.Addr6())), "\n")
	b.write(file)
	b.startWith(t, resolvers)
	b.holds(t, "name_not_resolved", "resolver "+b.Client.Addr4().String()+": SERVFAIL; it has no address, so its backends are missing")
	b.holds(t, "no_backend", "it has no backend")

	z.set(both(one)...)
	b.isServed(t, "with an answer", one)
	b.holds(t, "name_not_resolved", "")
	b.holds(t, "no_backend", "")
	z.set(append(both(one), both(two)...)...)
	b.isServed(t, "with two servers", one, two)
	var sessions []*session
	for _, vip := range vips {
		for range 10 {
			s, err := b.session(t, at(vip, 80))
			if err != nil {
				t.Fatal(err)
			}
			sessions = append(sessions, s)
		}
	}
	alive := func(when string) {
		t.Helper()
		for _, s := range sessions {
			if err := b.alive(s); err != nil {
				t.Errorf("%s: %v", when, err)
			}
		}
	}
	if code, out := b.backend("list"); code != 0 || strings.Count(out, "web.example.org") < 4 {
		t.Errorf("shunt backend list does not name the name for each address: exit code %d\n%s", code, out)
	}

	z.set(both(two)...)
	b.isServed(t, "without the first", two)
	alive("after the first has gone from the answer")
	z.fail()
	b.holds(t, "name_not_resolved", "SERVFAIL; its last addresses stay in force: ")
	b.kill()
	b.startWith(t, resolvers)
	b.isServed(t, "after a restart, with a resolver that fails", two)
	alive("after that")
	if out := b.reload(strings.ReplaceAll(file, "max: 2", "max: 1")); !strings.Contains(out, "dns from web.example.org (port 8080, weight 1, max 2) to web.example.org (port 8080, weight 1, max 1)") {
		t.Errorf("the reload says:\n%s", out)
	}
	alive("after a reload")

	z.set(append(both(one), append(both(two), lab.VIP4)...)...)
	b.isServed(t, "with max: 1", one)
	b.holds(t, "name_unusable", "192.0.2.10 is the address of a service; 2 addresses of web.example.org (A) are more than max: 1; the others take no flows")

	z.fail()
	b.holds(t, "name_not_resolved", "SERVFAIL; its last addresses stay in force: ")
	b.reload(b.file(settings{backends: []int{1}}))
	for _, code := range []string{"name_not_resolved", "name_unusable"} {
		b.holds(t, code, "")
	}
	if _, err := os.Stat("/var/lib/shunt/" + b.instance + ".names.json"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without names, their addresses are still on disk: %v", err)
	}
}

// withoutLines returns a text's lines, without the lines that have a word in them.
func withoutLines(text, word string) (kept []string) {
	for _, line := range strings.Split(text, "\n") {
		if !strings.Contains(line, word) {
			kept = append(kept, line)
		}
	}
	return kept
}
