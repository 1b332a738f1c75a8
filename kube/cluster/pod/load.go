package main

import (
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/pod/traffic"
	"github.com/shunt-lb/shunt/kube/cluster/meter"
)

func serveLoad() error {
	// A client that opens thousands of connections a second would use all ports within seconds: each is kept for a minute
	// (TCP_TIMEWAIT_LEN of include/net/tcp.h), or with this setting for a second.
	if err := os.WriteFile("/proc/sys/net/ipv4/tcp_tw_reuse", []byte("1"), 0); err != nil {
		return fmt.Errorf("reuse ports soon: %w: is the container privileged?", err)
	}
	server, err := traffic.Serve(meter.Here{}, netip.AddrPortFrom(netip.IPv4Unspecified(), meter.Port))
	if err != nil {
		return err
	}
	defer server.Close()
	return serve(map[string]http.HandlerFunc{"GET /measure": measure, "GET /until": until})
}

func measure(w http.ResponseWriter, r *http.Request) {
	to, err := netip.ParseAddrPort(r.FormValue("address"))
	var duration time.Duration
	if err == nil {
		duration, err = time.ParseDuration(r.FormValue("duration"))
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	sample, err := meter.Measure(meter.Here{}, traffic.Kind(r.FormValue("kind")), to, duration)
	reply(w, sample, err)
}

// probeInterval is the time between a connection that went to a wrong backend and the next one.
const probeInterval = 500 * time.Microsecond

func until(w http.ResponseWriter, r *http.Request) {
	limit, err := time.ParseDuration(r.FormValue("limit"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), limit)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for connections := 1; ; connections++ {
		one, done := context.WithTimeout(ctx, patience)
		answer, err := lab.Get(one, client, r.FormValue("address"))
		done()
		if err == nil && answer.Backend == r.FormValue("backend") {
			reply(w, meter.Turn{At: time.Now(), Connections: connections}, nil)
			return
		}
		select {
		case <-ctx.Done():
			reply(w, nil, fmt.Errorf("not within %s: the last of %d connections was answered by %q, %w", limit, connections, answer.Backend, ctx.Err()))
			return
		case <-time.After(probeInterval):
		}
	}
}
