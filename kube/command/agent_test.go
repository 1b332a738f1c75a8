package command

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/internal/node"
	"github.com/shunt-lb/shunt/internal/start"
	"github.com/shunt-lb/shunt/kube/translate"
)

func TestHealth(t *testing.T) {
	var well atomic.Bool
	probes := newProbes()
	server, address, err := serveHealth("127.0.0.1:0", well.Load, probes)
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	for _, want := range []int{http.StatusServiceUnavailable, http.StatusOK} {
		well.Store(want == http.StatusOK)
		answer, err := http.Get("http://" + address + "/healthz")
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, answer.Body)
		answer.Body.Close()
		if answer.StatusCode != want {
			t.Errorf("in step: %t, and the answer is %s", well.Load(), answer.Status)
		}
	}
	for _, code := range []string{"200", "503"} {
		if n := testutil.ToFloat64(probes.WithLabelValues(code)); n != 1 {
			t.Errorf("%s is counted %v times", code, n)
		}
	}
	if _, _, err := serveHealth(address, well.Load, probes); err == nil || !strings.Contains(err.Error(), "kube-proxy") {
		t.Errorf("the port is taken: %v", err)
	}
}

// TestStop: SIGTERM keeps the data plane while there is the DaemonSet, and detaches once it is gone.
func TestStop(t *testing.T) {
	for name, isThere := range map[string]bool{"there": true, "gone": false} {
		t.Run(name, func(t *testing.T) {
			client := fake.NewClientset()
			if isThere {
				client = fake.NewClientset(&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "shunt-kube"}})
			}
			told, tell := context.WithCancel(t.Context())
			flags := &start.Flags{Options: node.Options{OnExit: node.ExitKeep, Log: slog.New(slog.DiscardHandler), Interrupted: t.Context()}}
			stop, end, err := (&agent{daemonset: "kube-system/shunt-kube"}).begin(told, flags, client, func() bool { return true })
			if err != nil {
				t.Fatal(err)
			}
			defer end()
			if stop.Err() != nil {
				t.Error("it stops, and nobody has told it to")
			}
			tell()
			select {
			case <-stop.Done():
			case <-time.After(30 * time.Second):
				t.Fatal("it was told to stop, and does not")
			}
			if detaches := flags.Interrupted.Err() != nil; detaches == isThere {
				t.Errorf("it detaches: %t", detaches)
			}
		})
	}
}

func TestPrintExplanation(t *testing.T) {
	e := translate.Explanation{Ports: []translate.PortExplanation{
		{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP, Variants: []translate.VariantExplanation{{
			Service:   model.Service{Name: "default/web:http", Forwarding: model.ForwardingNAT, Policy: model.Policy{Rejects: true}},
			Endpoints: []translate.EndpointExplanation{{BackendAddress: model.BackendAddress{Address: netip.MustParseAddr("10.1.0.1"), Port: 8080}, Pod: "a", Takes: true, Why: "ready"}},
		}}},
		{Name: "dns", Port: 53, Protocol: corev1.ProtocolUDP, Variants: []translate.VariantExplanation{{
			Service: model.Service{Name: "default/web:dns", Forwarding: model.ForwardingNAT, Policy: model.Policy{Rejects: true}},
		}}},
	}}
	for wanted, lines := range map[string][]string{
		"":     {"port 80 TCP http", "port 53 UDP dns"},
		"http": {"    10.1.0.1:8080  a  takes  ready"},
		"53":   {"No endpoint takes new connections"},
	} {
		var out bytes.Buffer
		if err := printExplanation(&out, "default/web", wanted, e); err != nil {
			t.Errorf("%q: %v", wanted, err)
		}
		for _, line := range lines {
			if !strings.Contains(out.String(), line) {
				t.Errorf("%q: no %q in\n%s", wanted, line, out.String())
			}
		}
		if wanted == "53" && strings.Contains(out.String(), "port 80") {
			t.Errorf("another port is there, too:\n%s", out.String())
		}
	}
	if err := printExplanation(io.Discard, "default/web", "x", e); err == nil || !strings.Contains(err.Error(), `no port "x"; it has http 80, dns 53`) {
		t.Errorf("a port that there is not: %v", err)
	}
}
