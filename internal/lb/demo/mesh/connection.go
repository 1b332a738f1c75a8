package mesh

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// answerWithin is the limit for an answer that takes milliseconds if the server is there, and 3 s if its
// packets were lost twice (RFC 6298, 2.1 and 5.5).
const answerWithin = 4 * time.Second

// workers is the number of parallel requests: requests to a dead server wait together.
const workers = 100

// connection is one of the client's, with the machine whose server has it.
type connection struct {
	*lab.Session
	server string
	broken bool
}

func clientPrefix(n int) netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(20 + n)}), 24)
}

// each calls f for the numbers below count, a few at a time.
func each(count int, f func(int)) {
	var wg sync.WaitGroup
	for worker := range workers {
		wg.Go(func() {
			for n := worker; n < count; n += workers {
				f(n)
			}
		})
	}
	wg.Wait()
}

// connect opens connections, from all the client's addresses, and asks once on each. failed is the reason why
// not all of them are open.
func (d *demo) connect(ctx context.Context, count int) (opened []*connection, failed error) {
	all, errs := make([]*connection, count), make([]error, count)
	to := netip.AddrPortFrom(lab.VIP4, webPort).String()
	each(count, func(n int) {
		within, cancel := context.WithTimeout(ctx, answerWithin)
		defer cancel()
		session, err := d.lab.Client.OpenSession(within, "tcp", netip.AddrPortFrom(clientPrefix(n%clients).Addr(), 0), to)
		if err != nil {
			errs[n] = err
			return
		}
		answer, err := session.Ask(within, "/")
		if err != nil {
			errs[n] = errors.Join(err, session.Close())
			return
		}
		all[n] = &connection{Session: session, server: answer.Backend}
	})
	for n, c := range all {
		if c != nil {
			opened = append(opened, c)
		} else if failed == nil {
			failed = errs[n]
		}
	}
	return opened, failed
}

// round asks once more on each connection that is not broken, and shows the packets that the machines have
// counted since the last round.
func (d *demo) round(ctx context.Context, step string, machines []*machine, open []*connection) (Round, error) {
	r := Round{Step: step, Served: map[string]int{}, Broken: map[string]int{}}
	answers, errs := make([]lab.Answer, len(open)), make([]error, len(open))
	each(len(open), func(n int) {
		within, cancel := context.WithTimeout(ctx, answerWithin)
		defer cancel()
		if !open[n].broken {
			answers[n], errs[n] = open[n].Ask(within, "/")
		}
	})
	if ctx.Err() != nil {
		return r, context.Cause(ctx)
	}
	for n, c := range open {
		switch {
		case c.broken:
		case errs[n] != nil:
			c.broken = true
			r.Broken[c.server]++
		default:
			r.Served[answers[n].Backend]++
			if answers[n].Backend != c.server {
				r.Moved++
			}
		}
	}
	var err error
	if r.Entered, r.TakenOut, err = d.count(ctx, machines); err != nil {
		return r, err
	}
	d.facts.Rounds = append(d.facts.Rounds, r)
	d.show(r, machines)
	return r, nil
}

// counters are packets that a machine has balanced, and taken out of outer headers.
type counters struct{ balanced, takenOut uint64 }

// status is the part of `shunt status -o json` that the demo uses.
type status struct {
	Services []struct {
		PacketsIn uint64 `json:"packets_in"`
		Backends  []struct {
			Name  string `json:"name"`
			State string `json:"state"`
		} `json:"backends"`
	} `json:"services"`
	Reasons map[string]struct {
		Packets uint64 `json:"packets"`
	} `json:"reasons"`
}

func (d *demo) status(ctx context.Context, m *machine) (s status, err error) {
	out, err := m.Command(ctx, d.opts.Executable, "status", "--instance", d.instance(m), "--socket", d.socket(m), "-o", "json").Output()
	if err != nil && len(out) == 0 {
		return s, fmt.Errorf("run `shunt status` on %s: %w", m.Name(), err)
	}
	if err := json.Unmarshal(out, &s); err != nil {
		return s, fmt.Errorf("read the output of `shunt status -o json` on %s: %w", m.Name(), err)
	}
	return s, nil
}

// count reads the counters of machines since the last call, without the zeros.
func (d *demo) count(ctx context.Context, machines []*machine) (balanced, takenOut map[string]uint64, err error) {
	balanced, takenOut = map[string]uint64{}, map[string]uint64{}
	for _, m := range machines {
		s, err := d.status(ctx, m)
		if err != nil {
			return nil, nil, err
		}
		now := counters{takenOut: s.Reasons["decap_ipip"].Packets}
		for _, service := range s.Services {
			now.balanced += service.PacketsIn
		}
		if n := now.balanced - m.counted.balanced; n > 0 {
			balanced[m.Name()] = n
		}
		if n := now.takenOut - m.counted.takenOut; n > 0 {
			takenOut[m.Name()] = n
		}
		m.counted = now
	}
	return balanced, takenOut, nil
}

// awaitUp waits until machines have found as many servers up.
func (d *demo) awaitUp(ctx context.Context, machines []*machine, up int) error {
	for _, m := range machines {
		last := ""
		end := time.Now().Add(patience)
		for {
			s, err := d.status(ctx, m)
			found := 0
			if err == nil && len(s.Services) == 1 {
				for _, b := range s.Services[0].Backends {
					if b.State == "active" || b.State == "draining" {
						found++
					}
				}
			}
			if found == up {
				break
			}
			last = fmt.Sprintf("%d of %d; %v", found, up, err)
			if time.Now().After(end) || ctx.Err() != nil {
				return errors.Join(context.Cause(ctx), fmt.Errorf("wait until %s has found the servers up: %s", m.Name(), last))
			}
			select {
			case <-m.daemon.Ended:
				return fmt.Errorf("shunt run on %s ended: %w", m.Name(), m.daemon.Err())
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	return nil
}

// shunt runs a command on a machine to its end.
func (d *demo) shunt(ctx context.Context, m *machine, args ...string) error {
	out, err := m.Command(ctx, d.opts.Executable, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("run `shunt %s` on %s: %w: %s", strings.Join(args, " "), m.Name(), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// remains lists the remains of shunt on a machine.
func remains(m *machine) (left []string, err error) {
	links, err := m.Netlink().LinkList()
	if err != nil {
		return nil, fmt.Errorf("list the interfaces of %s: %w", m.Name(), err)
	}
	for _, link := range links {
		if xdp := link.Attrs().Xdp; xdp != nil && xdp.Attached {
			left = append(left, "a program on "+link.Attrs().Name+" of "+m.Name())
		}
		addresses, err := m.Netlink().AddrList(link, 0)
		if err != nil {
			return nil, fmt.Errorf("list the addresses of %s: %w", m.Name(), err)
		}
		for _, a := range addresses {
			if a.IP.Equal(lab.VIP4.AsSlice()) {
				left = append(left, "the VIP on "+m.Name())
			}
		}
	}
	return left, nil
}

func sum[N int | uint64](by map[string]N) (n N) {
	for _, one := range by {
		n += one
	}
	return n
}

func because(err error) string {
	if err == nil {
		return ""
	}
	return ": " + err.Error()
}

func namesOf(machines []*machine) string {
	var names []string
	for _, m := range machines {
		names = append(names, m.Name())
	}
	return strings.Join(names, ", ")
}
