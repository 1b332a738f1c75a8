package health

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/lb/model"
)

// TestFiveThousandChecks checks 5,000 backends every 2 s, over loopback: each has an address of
// its own in 127.0.0.0/8, and one server accepts for all. It reports the delay of probes, and
// fails only for results that do not depend on the machine: SHUNT_SOAK=1 makes it a measurement of a
// minute.
func TestFiveThousandChecks(t *testing.T) {
	const count = 5000
	duration := 3 * time.Second
	if os.Getenv("SHUNT_SOAK") != "" {
		duration = time.Minute
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := listener.Addr().(*net.TCPAddr).Port
	listener.Close()
	listener, err = net.Listen("tcp4", fmt.Sprintf("0.0.0.0:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	var accepted atomic.Int64
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			accepted.Add(1)
			go func() { conn.Read(make([]byte, 1)); conn.Close() }()
		}
	}()
	m := New(Options{OnTransition: func(tr Transition) {
		if tr.To != up {
			t.Errorf("%s", tr)
		}
	}})
	// A slow machine answers late; the test is not about that.
	h := model.Health{Check: model.CheckTCP, Interval: 2 * time.Second, Timeout: 30 * time.Second, Rise: 1, Fall: 3, Jitter: 10}
	s := model.Service{Name: "many", Health: h}
	for i := range count {
		a := netip.AddrFrom4([4]byte{127, 1, byte(i / 250), byte(i%250 + 1)})
		s.Backends = append(s.Backends, backend(a.String(), uint16(port)))
	}
	var before, after syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &before)
	m.Update([]*model.Service{&s}, nil)
	time.Sleep(duration)
	late := m.TakeTrouble()
	syscall.Getrusage(syscall.RUSAGE_SELF, &after)
	for deadline := time.Now().Add(time.Minute); strings.Contains(words(m.Serve([]*model.Service{&s}, false, nobodyLost)), "-"); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("some of %d backends that accept have not come up", count)
		}
	}
	cpu := func(r syscall.Rusage) time.Duration { return time.Duration(r.Utime.Nano() + r.Stime.Nano()) }
	t.Logf("%d probes in %s, %d accepted: at most %s late, %d later than %s; client and server took %.2f CPUs",
		late.Probes, duration, accepted.Load(), late.Max.Round(time.Millisecond), late.Late, lateFrom, float64(cpu(after)-cpu(before))/float64(duration))
	// Before Close, which breaks off connections that are being made. So does a timeout on a slow
	// machine; then the kernel ends them in its own way.
	if left := timeWait(t, port); left > int(accepted.Load())/100 {
		t.Errorf("%d connections of %d are left in TIME_WAIT", left, accepted.Load())
	}
	m.Close()
}

// timeWait counts the connections to a port that rest in TIME_WAIT.
func timeWait(t *testing.T, port int) (count int) {
	text, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) > 3 && fields[3] == "06" && strings.Contains(fields[1]+" "+fields[2], fmt.Sprintf(":%04X", port)) {
			count++
		}
	}
	return count
}
