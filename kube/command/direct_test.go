package command

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/shunt-lb/shunt/internal/lb/model"
	"github.com/shunt-lb/shunt/kube/place"
)

// TestOpener: the entry is there while the node opens tunnels, goes when the agent detaches or has no --direct-return, and a refusal
// is in the log, with the key.
func TestOpener(t *testing.T) {
	client := fake.NewClientset(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "k", Name: "t"}, Data: map[string]string{"n1_tunnel": "ipip", "n2_tunnel": "ipip"}})
	has := func(when, want string) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
			now, err := client.CoreV1().ConfigMaps("k").Get(t.Context(), "t", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if fmt.Sprint(now.Data) == want {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%s, the entries are %v, want %s", when, now.Data, want)
			}
		}
	}
	var log bytes.Buffer
	open := func(direct, tunnels string) *opener {
		o, err := newOpener(&cluster{node: "n1", direct: direct, tunnels: tunnels}, client, slog.New(slog.NewTextHandler(&log, nil)))
		if err != nil {
			t.Fatal(err)
		}
		o.begin(t.Context())
		return o
	}
	open("", "k/t")
	has("without the switch", "map[n2_tunnel:ipip]")
	o := open("gue", "k/t")
	o.Seen(nil)
	o.Opens(place.Tunnel{Forwarding: model.ForwardingDSRGUE, Port: 6080})
	has("with the switch", "map[n1_tunnel:gue:6080 n2_tunnel:ipip]")
	o.encapsulated(model.Encapsulation{GUEPort: 6080})
	o.withdraw()
	has("after its end", "map[n2_tunnel:ipip]")
	o.wait()
	none := open("", "")
	none.withdraw()
	none.wait()
	if strings.Contains(log.String(), "level=WARN") {
		t.Errorf("it warns:\n%s", log.String())
	}
	o.encapsulated(model.Encapsulation{GUEPort: 6080, Sources4: netip.MustParsePrefix("10.0.0.0/24")})
	client.PrependReactor("patch", "configmaps", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, errors.New("no right") })
	o.withdraw()
	for _, says := range []string{"other nodes drop packets that are not from the address of this node's agent", "key=n1_tunnel", "no right"} {
		if !strings.Contains(log.String(), says) {
			t.Errorf("the log lacks %q:\n%s", says, log.String())
		}
	}
	var usage usageError
	if _, err := newOpener(&cluster{direct: "gue", tunnels: "x"}, client, slog.New(slog.DiscardHandler)); !errors.As(err, &usage) || !strings.Contains(err.Error(), "NAMESPACE/NAME") {
		t.Errorf("a ConfigMap called x: %v", err)
	}
}
