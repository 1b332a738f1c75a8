package probe

import (
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/kube/translate"
)

// free is a port that nobody else has, and the listener that holds it until the test closes it.
func free(t *testing.T) (number uint16, holder net.Listener) {
	t.Helper()
	for number := uint16(20000); number < 30000; number++ { // below the ports that the kernel gives to others meanwhile
		l, err := net.Listen("tcp", ":"+strconv.Itoa(int(number)))
		if err == nil {
			t.Cleanup(func() { _ = l.Close() })
			return number, l
		}
	}
	t.Fatal("no port is free")
	return 0, nil
}

func ask(number uint16) (status int, weight, body string, err error) {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Get("http://127.0.0.1:" + strconv.Itoa(int(number)) + "/any")
	if err != nil {
		return 0, "", "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, response.Header.Get(weightHeader), strings.TrimSpace(string(text)), err
}

func TestAnswer(t *testing.T) {
	well := true
	s := New(func() bool { return well })
	t.Cleanup(s.Close)
	number, holder := free(t)
	_ = holder.Close()
	want := func(status int, weight, body string) {
		t.Helper()
		gotStatus, gotWeight, gotBody, err := ask(number)
		if gotStatus != status || gotWeight != weight || gotBody != body || err != nil {
			t.Errorf("it answers %d, weight %s, %s, %v; want %d, %s, %s", gotStatus, gotWeight, gotBody, err, status, weight, body)
		}
	}
	answer := func(key translate.Key, local int) {
		t.Helper()
		if faults := s.Answer(map[translate.Key]translate.Health{key: {Port: number, Local: local}}); len(faults) > 0 {
			t.Fatal(faults)
		}
	}
	answer("shop/web", 2)
	want(200, "2", `{"service":{"namespace":"shop","name":"web"},"localEndpoints":2,"serviceProxyHealthy":true}`)
	answer("shop/web", 0)
	want(503, "0", `{"service":{"namespace":"shop","name":"web"},"localEndpoints":0,"serviceProxyHealthy":true}`)
	answer("shop/next", 1) // another Service has got its port
	want(200, "1", `{"service":{"namespace":"shop","name":"next"},"localEndpoints":1,"serviceProxyHealthy":true}`)
	well = false
	want(503, "1", `{"service":{"namespace":"shop","name":"next"},"localEndpoints":1,"serviceProxyHealthy":false}`)
	s.Answer(nil)
	if status, _, _, err := ask(number); err == nil {
		t.Errorf("without a Service it answers %d", status)
	}
}

// TestTaken: a port at which no answer can be given is a fault, and is answered once it is free.
func TestTaken(t *testing.T) {
	s := New(func() bool { return true })
	t.Cleanup(s.Close)
	number, holder := free(t)
	other, otherHolder := free(t)
	_ = otherHolder.Close()
	services := map[translate.Key]translate.Health{"a/taken": {Port: number, Local: 1}, "a/web": {Port: other, Local: 1}}
	faults := s.Answer(services)
	if len(faults) != 1 || faults[0].Object != "Service a/taken" || faults[0].Code != translate.HealthPortUnserved || !strings.Contains(faults[0].Text, "address already in use") {
		t.Fatalf("%v", faults)
	}
	if status, _, _, err := ask(other); status != 200 {
		t.Errorf("the other one answers %d, %v", status, err)
	}
	_ = holder.Close()
	if faults := s.Answer(services); len(faults) > 0 {
		t.Error(faults)
	}
	if status, _, _, err := ask(number); status != 200 {
		t.Errorf("it answers %d, %v", status, err)
	}
}
