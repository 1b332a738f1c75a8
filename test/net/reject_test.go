package net

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// TestReject: a service without a backend for new flows refuses them at once, as a host without the
// service does, while the flows of a draining backend go on; a flow whose backend is removed is
// reset; with on_no_backend: drop there is no answer. A condition names the service meanwhile.
func TestReject(t *testing.T) {
	for _, way := range []struct{ forwarding, attach string }{{"nat", "native"}, {"nat", "generic"}, {"nat", "tc"}, {"dsr-ipip", "native"}} {
		t.Run(way.forwarding+"/"+way.attach, func(t *testing.T) {
			b := newDirectBed(t, lab.Options{Layout: lab.OneArm, MTU: roomy, Backends: 2}, 2)
			if way.forwarding == "nat" {
				b.serveOwn(b.Backends[0])
			} else {
				b.decap(directVIPs(0), b.Backends...)
			}
			file := func(backend int, weight string) string {
				var lines []string
				for _, a := range both(b.Backends[backend]) {
					lines = append(lines, line(a, weight))
				}
				return strings.ReplaceAll(b.one(way.forwarding, "", lines...), "attach: native", "attach: "+way.attach)
			}
			b.write(file(0, "weight: 1"))
			b.start()
			if c := b.status().condition("no_backend"); c != "" {
				t.Errorf("with backends there is the condition no_backend: %s", c)
			}
			sessions := map[netip.Addr]*session{}
			for _, vip := range vips {
				s, err := b.session(t, at(vip, 80))
				if err != nil {
					t.Fatal(err)
				}
				sessions[vip] = s
			}

			b.reload(file(0, "weight: 0"))
			if c := b.status().condition("no_backend"); !strings.Contains(c, "web") && !strings.Contains(c, "twin") {
				t.Errorf("with weight 0 the condition no_backend is %q", c)
			}
			for _, vip := range vips {
				b.refuses(t, "with weight 0", vip)
				if err := b.alive(sessions[vip]); err != nil {
					t.Errorf("a connection of the draining backend over %s: %v", family(vip), err)
				}
			}

			b.reload(file(1, "weight: 0")) // and the other backend is removed
			for _, vip := range vips {
				b.refuses(t, "after removal", vip)
				if _, err := sessions[vip].get(); !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("a connection of the removed backend over %s: %v, want a reset", family(vip), err)
				}
			}

			b.reload(strings.ReplaceAll(file(1, "weight: 0"), "    backends:\n", "    on_no_backend: drop\n    backends:\n"))
			for _, vip := range vips {
				b.staysSilent(t, vip)
			}
			b.reload(file(0, "weight: 1"))
			if c := b.status().condition("no_backend"); c != "" {
				t.Errorf("with backends again there is the condition no_backend: %s", c)
			}
			for _, vip := range vips {
				if _, err := b.get(b.Client.HTTPClient(false), at(vip, 80)); err != nil {
					t.Errorf("with backends again: %v", err)
				}
			}
		})
	}
}

// atOnce is less than a second, the time after which TCP would send its SYN again (RFC 6298, 2).
const atOnce = 900 * time.Millisecond

// refuses requires that a connection and a datagram are refused before anything is repeated.
func (b *bed) refuses(t *testing.T, when string, vip netip.Addr) {
	t.Helper()
	for protocol, try := range map[string]func(context.Context) error{
		"tcp": func(ctx context.Context) error { return b.connects(ctx, vip) },
		"udp": func(ctx context.Context) error {
			_, err := b.Client.AskUDP(ctx, at(vip, 53), []byte("who?"))
			return err
		},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), patience*atOnce)
		if err := try(ctx); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s, %s over %s: %v, want it to be refused at once", when, protocol, family(vip), err)
		}
		cancel()
	}
}

// staysSilent requires that there is no answer in the time of a refusal.
func (b *bed) staysSilent(t *testing.T, vip netip.Addr) {
	t.Helper()
	before := b.status().Reasons["no_backend"].Packets
	for protocol, try := range map[string]func(context.Context) error{
		"tcp": func(ctx context.Context) error { return b.connects(ctx, vip) },
		"udp": func(ctx context.Context) error {
			_, err := b.Client.AskUDP(ctx, at(vip, 53), []byte("who?"))
			return err
		},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), atOnce)
		var timeout interface{ Timeout() bool }
		if err := try(ctx); !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("%s over %s with on_no_backend: drop: %v, want no answer", protocol, family(vip), err)
		}
		cancel()
	}
	if after := b.status().Reasons["no_backend"].Packets; after < before+2 {
		t.Errorf("%d packets are counted as no_backend, 2 or more ended so", after-before)
	}
}

// connects opens a connection and closes it.
func (b *bed) connects(ctx context.Context, vip netip.Addr) error {
	conn, err := b.Client.Dial(ctx, "tcp", at(vip, 80))
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	return conn.Close()
}
