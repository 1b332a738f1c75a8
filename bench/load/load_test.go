package load

import (
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"
)

// serve answers on loopback and holds up one request, by number.
func serve(t *testing.T, held int64, hold time.Duration) netip.AddrPort {
	t.Helper()
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var count atomic.Int64
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if count.Add(1) == held {
			time.Sleep(hold) // the stall under test, not a wait for something
		}
		w.Write([]byte("ok\n"))
	})}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })
	return netip.MustParseAddrPort(listener.Addr().String())
}

// TestStallIsSeenByAll holds up one request on one connection: every request that was due
// meanwhile must show the time it waited, not only the one that was held.
func TestStallIsSeenByAll(t *testing.T) {
	const hold = 400 * time.Millisecond
	target := serve(t, 20, hold)
	r, err := Run(Options{Target: target, Rate: 200, Connections: 1, Duration: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if r.Answered != 200 || r.Requests != 200 {
		t.Errorf("%d of %d answered, want 200 of 200", r.Answered, r.Requests)
	}
	// 80 of 200 were due during the stall: the 90th percentile lies among them.
	if r.P90us < 100_000 {
		t.Errorf("p90 is %.0f µs: the requests that waited are not counted", r.P90us)
	}
	if r.QueuedMax < 40 {
		t.Errorf("at most %d requests waited, want about 80", r.QueuedMax)
	}
}

func TestAnswerComplete(t *testing.T) {
	for _, test := range []struct {
		name, text string
		want, bad  bool
	}{
		{"whole", "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n", true, false},
		{"half a body", "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok", false, false},
		{"half a header", "HTTP/1.1 200 OK\r\nContent-Le", false, false},
		{"too much", "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nok", false, true},
		{"refused", "HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", false, true},
		{"no length", "HTTP/1.1 200 OK\r\n\r\n", false, true},
	} {
		got, err := answerComplete([]byte(test.text))
		if got != test.want || (err != nil) != test.bad {
			t.Errorf("%s: %v, %v", test.name, got, err)
		}
	}
}

func TestQuantile(t *testing.T) {
	values := make([]time.Duration, 100)
	for i := range values {
		values[i] = time.Duration(i + 1)
	}
	for part, want := range map[float64]time.Duration{0.5: 50, 0.99: 99, 0.999: 100, 1: 100} {
		if got := quantile(values, part); got != want {
			t.Errorf("quantile %v is %d, want %d", part, got, want)
		}
	}
	if quantile(nil, 0.5) != 0 {
		t.Error("quantile of nothing is not 0")
	}
}

// TestOverload: requests without an answer at the end count with their time, and are an error only where overload
// is not expected.
func TestOverload(t *testing.T) {
	o := Options{Target: serve(t, 1, time.Second), Rate: 100, Connections: 1, Duration: 200 * time.Millisecond, Drain: 100 * time.Millisecond}
	if _, err := Run(o); err == nil {
		t.Error("took a run without answers")
	}
	o.Target, o.Overload = serve(t, 1, time.Second), true
	r, err := Run(o)
	if err != nil || r.Missing != 20 || r.Answered != 0 {
		t.Fatalf("%+v, %v; want 20 missing", r, err)
	}
	if r.Maxus < 300_000 || r.P50us < 150_000 {
		t.Errorf("%+v: the waiting time is not in it", r)
	}
}
