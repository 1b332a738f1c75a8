package file

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// TestHealth reads the health of services, combined from their own settings and the defaults.
func TestHealth(t *testing.T) {
	usual := model.Health{Interval: 2 * time.Second, Timeout: time.Second, Rise: 2, Fall: 3, Jitter: 5}
	with := func(change func(*model.Health)) model.Health {
		h := usual
		change(&h)
		return h
	}
	tcp := with(func(h *model.Health) { h.Check = model.CheckTCP })
	good := []model.StatusRange{{First: 200, Last: 399}}
	for _, c := range []struct {
		defaults, own string
		want          model.Health
	}{
		{"{}", "", model.Health{}},
		{"{interval: 5s}", "", model.Health{}},
		{"{tcp: {}}", "", tcp},
		{"{tcp: {}}", "{enabled: false}", model.Health{}},
		{"{tcp: {}, enabled: false}", "", model.Health{}},
		{"{tcp: {}, enabled: false}", "{enabled: true}", tcp},
		{"{tcp: {port: 1}}", "{tcp: {}}", tcp},
		{"{interval: 5s, fall: 9}", "{tcp: {}, fall: 1}", with(func(h *model.Health) { h.Check, h.Interval, h.Fall = model.CheckTCP, 5*time.Second, 1 })},
		{"{tcp: {}}", "{interval: 500ms}", with(func(h *model.Health) {
			h.Check, h.Interval, h.Timeout = model.CheckTCP, 500*time.Millisecond, 500*time.Millisecond
		})},
		{"{tcp: {}, interval: 1s}", "{http: {}, panic: 30%}", with(func(h *model.Health) {
			h.Check, h.Interval, h.Panic = model.CheckHTTP, time.Second, 30
			h.HTTP = model.HealthHTTP{Path: "/", Statuses: good}
		})},
		{"{}", "{https: {port: 8443, host: a.test, body: all is well, verify: false, server_name: b.test}, jitter: 0%}", with(func(h *model.Health) {
			h.Check, h.Port, h.Jitter = model.CheckHTTPS, 8443, 0
			h.HTTP = model.HealthHTTP{Path: "/", Host: "a.test", Body: "all is well", Statuses: good}
			h.TLS = model.HealthTLS{ServerName: "b.test", NoVerify: true}
		})},
		{"{}", "{https: {ca_file: /etc/ca.pem}}", with(func(h *model.Health) {
			h.Check, h.TLS.CAFile = model.CheckHTTPS, "/etc/ca.pem"
			h.HTTP = model.HealthHTTP{Path: "/", Statuses: good}
		})},
		{"{}", "{grpc: {service: a.B}}", with(func(h *model.Health) { h.Check, h.GRPC.Service = model.CheckGRPC, "a.B" })},
		{"{}", `{udp: {send: "hex:00 ff0a", expect: pong}}`, with(func(h *model.Health) {
			h.Check, h.UDP = model.CheckUDP, model.HealthUDP{Send: "\x00\xff\x0a", Expect: "pong"}
		})},
		{"{}", `{exec: {command: [/bin/check, "a b"]}}`, with(func(h *model.Health) { h.Check, h.Exec = model.CheckExec, []string{"/bin/check", "a b"} })},
	} {
		own := ""
		if c.own != "" {
			own = ", health: " + c.own
		}
		text := fmt.Sprintf("interfaces: [{name: eth0}]\ndefaults: {health: %s}\nservices: [{name: web, address: 192.0.2.10, port: 80, backends: [{address: 10.0.0.2}]%s}]\n", c.defaults, own)
		path := filepath.Join(write(t, map[string]string{"a.yaml": text}), "a.yaml")
		have, faults := load(t, path)
		if len(faults) > 0 {
			t.Errorf("%s\n%v", text, faults)
			continue
		}
		if diff := cmp.Diff(c.want, have.Services[0].Health); diff != "" {
			t.Errorf("%s\n(-want +got):\n%s", text, diff)
		}
		p, err := Read(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.Unchecked(); slices.Equal(got, []string{"web"}) != (c.want.Check == "") {
			t.Errorf("%s\nnobody checks %v", text, got)
		}
	}
}
