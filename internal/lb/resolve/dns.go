package resolve

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/miekg/dns"
)

// ConfigPath is the file with the resolvers, resolv.conf(5).
const ConfigPath = "/etc/resolv.conf"

const (
	// payloadMax is the maximum number of bytes of an answer over UDP: it fits into IPv6's minimum MTU (DNS Flag Day
	// 2020). Larger answers come over TCP.
	payloadMax = 1232
	// emptyTTL is for answers without addresses that do not have a TTL (RFC 2308, 5).
	emptyTTL = 30 * time.Second
	// ttlMin keeps a name with TTL 0 from being looked up all the time, and ttlMax is RFC 8767's limit of one
	// week cut to a day: a wrong answer does not stay for ever.
	ttlMin, ttlMax = time.Second, 24 * time.Hour
)

// record types by family.
var types = map[Family]uint16{IPv4: dns.TypeA, IPv6: dns.TypeAAAA}

// stub asks the resolvers in a file. It reads the file each time.
type stub struct {
	path string
	port string // replaces the port of the file's resolvers, for tests
}

// lookup asks for the addresses of one family. A name without any has an answer, too, and a name that does not
// exist is an error.
func (s stub) lookup(ctx context.Context, q Question) (reply, error) {
	config, err := dns.ClientConfigFromFile(s.path)
	if err != nil {
		return reply{}, fmt.Errorf("read the resolvers: %w", err)
	}
	if len(config.Servers) == 0 {
		return reply{}, fmt.Errorf("%s names no resolver (nameserver)", s.path)
	}
	if s.port != "" {
		config.Port = s.port
	}
	var empty *reply
	for _, name := range config.NameList(q.Name) {
		answer, err := askAll(ctx, config, name, types[q.Family])
		switch {
		case err != nil:
			return reply{}, err
		case answer.Rcode == dns.RcodeNameError:
			continue
		}
		r := read(answer, name, types[q.Family])
		if len(r.addresses) > 0 {
			return r, nil
		}
		if empty == nil {
			empty = &r
		}
	}
	if empty != nil {
		return *empty, nil
	}
	return reply{}, errors.New("the name does not exist (NXDOMAIN)")
}

// askAll asks the resolvers in their order until one answers, with the number of attempts in the file.
func askAll(ctx context.Context, config *dns.ClientConfig, name string, kind uint16) (*dns.Msg, error) {
	var failed error
	for range config.Attempts {
		for _, server := range config.Servers {
			answer, err := ask(ctx, net.JoinHostPort(server, config.Port), time.Duration(config.Timeout)*time.Second, name, kind)
			if err == nil {
				return answer, nil
			}
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			failed = fmt.Errorf("resolver %s: %w", server, err)
		}
	}
	return nil, failed
}

// ask asks one resolver over UDP, and over TCP if the answer does not fit (RFC 7766).
func ask(ctx context.Context, server string, timeout time.Duration, name string, kind uint16) (*dns.Msg, error) {
	question := new(dns.Msg)
	question.SetQuestion(name, kind)
	question.SetEdns0(payloadMax, false)
	for _, network := range []string{"udp", "tcp"} {
		client := &dns.Client{Net: network, Timeout: timeout, UDPSize: payloadMax}
		answer, err := exchange(ctx, client, question, server)
		switch {
		case err != nil:
			return nil, plain(err, timeout)
		case len(answer.Question) != 1 || !strings.EqualFold(answer.Question[0].Name, name) || answer.Question[0].Qtype != kind:
			return nil, errors.New("it answered another question")
		case answer.Truncated && network == "udp":
			continue
		case answer.Truncated:
			return nil, errors.New("its answer is cut off over TCP, too")
		case answer.Rcode != dns.RcodeSuccess && answer.Rcode != dns.RcodeNameError:
			return nil, errors.New(dns.RcodeToString[answer.Rcode])
		}
		return answer, nil
	}
	return nil, errors.New("its answer is cut off")
}

// exchange sends a question and waits for the answer, which ends with ctx.
func exchange(ctx context.Context, client *dns.Client, question *dns.Msg, server string) (*dns.Msg, error) {
	conn, err := client.DialContext(ctx, server)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() }) // the library does not see that ctx is cancelled
	defer func() {
		if stop() {
			_ = conn.Close() // nothing is lost
		}
	}()
	answer, _, err := client.ExchangeWithConnContext(ctx, question, conn)
	return answer, err
}

// plain returns an error of the network without words that the sentence contains anyway.
func plain(err error, timeout time.Duration) error {
	var errno syscall.Errno
	var late net.Error
	switch {
	case errors.As(err, &late) && late.Timeout():
		return fmt.Errorf("no answer within %s", timeout)
	case errors.As(err, &errno):
		return errno
	}
	return err
}

// reply is the resolvers' answer for a name.
type reply struct {
	addresses []netip.Addr // each once, in order
	ttl       time.Duration
}

// read finds the addresses, and their TTL: that of the record that expires first, aliases included.
func read(answer *dns.Msg, name string, kind uint16) reply {
	owners := aliases(answer, name)
	var r reply
	ttl := ttlMax
	for _, record := range answer.Answer {
		header := record.Header()
		if !owners[dns.CanonicalName(header.Name)] || header.Rrtype != kind && header.Rrtype != dns.TypeCNAME {
			continue // another question's record
		}
		ttl = min(ttl, time.Duration(header.Ttl)*time.Second)
		var a netip.Addr
		switch x := record.(type) {
		case *dns.A:
			a, _ = netip.AddrFromSlice(x.A.To4())
		case *dns.AAAA:
			a, _ = netip.AddrFromSlice(x.AAAA)
		}
		if a.IsValid() && !a.Is4In6() { // IPv4 in IPv6's form is no address of any host
			r.addresses = append(r.addresses, a)
		}
	}
	if len(r.addresses) == 0 {
		ttl = min(ttl, emptyTTL)
		for _, record := range answer.Ns {
			if soa, is := record.(*dns.SOA); is {
				ttl = time.Duration(min(soa.Hdr.Ttl, soa.Minttl)) * time.Second
			}
		}
	}
	slices.SortFunc(r.addresses, netip.Addr.Compare)
	r.addresses = slices.Compact(r.addresses)
	r.ttl = min(max(ttl, ttlMin), ttlMax)
	return r
}

// aliases returns a name and all names that it is an alias of, in any order in the answer.
func aliases(answer *dns.Msg, name string) map[string]bool {
	owners := map[string]bool{dns.CanonicalName(name): true}
	for more := true; more; {
		more = false
		for _, record := range answer.Answer {
			alias, is := record.(*dns.CNAME)
			if is && owners[dns.CanonicalName(alias.Hdr.Name)] && !owners[dns.CanonicalName(alias.Target)] {
				owners[dns.CanonicalName(alias.Target)], more = true, true
			}
		}
	}
	return owners
}
