package event_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	ktesting "k8s.io/client-go/testing"

	"github.com/shunt-lb/shunt/kube/event"
	"github.com/shunt-lb/shunt/kube/translate"
)

// quick is for tests: an Event that is sent once a minute is sent at once.
var quick = event.Pace{Again: time.Millisecond, Refresh: time.Hour, Retry: time.Millisecond}

func fault(code translate.Code, text string) event.Fault {
	return event.Fault{Fault: translate.Fault{Code: code, Object: "Service default/web", Text: text, Remedy: "fix it"},
		About: corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: "default", Name: "web", UID: "4711"}}
}

// teller runs one until the test ends.
func teller(t *testing.T, client *fake.Clientset, node string, pace event.Pace, log *slog.Logger) *event.Teller {
	t.Helper()
	teller := event.New(client, node, pace, log)
	ctx, cancel := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Go(func() { teller.Run(ctx) })
	t.Cleanup(func() { cancel(); ended.Wait() })
	return teller
}

// settled waits until all Tellers have sent their due Events, in the time of the bubble: each Show has been seen and
// carried out by its own agent, and not only by another that has the same fault.
func settled() {
	synctest.Wait()
	time.Sleep(time.Second) // of the bubble: none of the wall's
	synctest.Wait()
}

// are reports whether the Events are these once all are written: type, reason, count and message.
func are(t *testing.T, client *fake.Clientset, what string, want ...string) {
	t.Helper()
	settled()
	var lines []string
	for _, e := range list(t, client) {
		lines = append(lines, fmt.Sprintf("%s %s %d %s %s", e.Type, e.Reason, e.Count, e.InvolvedObject.Name, e.Message))
	}
	slices.Sort(lines)
	slices.Sort(want)
	if !slices.Equal(lines, want) {
		t.Fatalf("%s: the Events are\n%s\nwant\n%s", what, strings.Join(lines, "\n"), strings.Join(want, "\n"))
	}
}

func list(t *testing.T, client *fake.Clientset) []corev1.Event {
	t.Helper()
	all, err := client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return all.Items
}

// TestTeller: two agents have the same fault, and one of them another one. There is one Event for each cause, which goes
// with its fault.
func TestTeller(t *testing.T) { synctest.Test(t, testTeller) }

func testTeller(t *testing.T) {
	client := fake.NewClientset()
	log := slog.New(slog.DiscardHandler)
	one, two := teller(t, client, "n1", quick, log), teller(t, client, "n2", quick, log)
	same, other := fault(translate.SCTPRefused, "port 80 is SCTP"), fault(translate.ServiceRefused, "it is the file's")
	one.Show([]event.Fault{same})
	two.Show([]event.Fault{same, other})
	const warning, refused = "Warning SCTPNotServed 1 web port 80 is SCTP: fix it", "Warning ServiceRefused 1 web on node n2: it is the file's: fix it"
	are(t, client, "faults", warning, refused)
	one.Show([]event.Fault{same})
	two.Show([]event.Fault{same})
	const over = "Normal ServiceRefused 1 web Ended: on node n2: it is the file's"
	are(t, client, "one has ended", warning, over)
	one.Show(nil)
	two.Show(nil)
	are(t, client, "all have ended", "Normal SCTPNotServed 1 web Ended: port 80 is SCTP", over)
	one.Show([]event.Fault{same})
	are(t, client, "it is back", "Warning SCTPNotServed 2 web port 80 is SCTP: fix it", over)
	again := teller(t, client, "n1", quick, log)
	again.Show([]event.Fault{same, other})
	are(t, client, "an agent that starts again", "Warning SCTPNotServed 2 web port 80 is SCTP: fix it", over, "Warning ServiceRefused 1 web on node n1: it is the file's: fix it")
}

// TestPace: a fault that comes and goes is written in its last state once the pace allows it, and one that holds is
// written anew.
func TestPace(t *testing.T) { synctest.Test(t, testPace) }

func testPace(t *testing.T) {
	client := fake.NewClientset()
	slow := teller(t, client, "n1", event.Pace{Again: time.Hour, Refresh: time.Hour, Retry: time.Millisecond}, slog.New(slog.DiscardHandler))
	flaps, marks := fault(translate.EndpointsMissing, "no endpoint"), fault(translate.SCTPRefused, "port 80 is SCTP")
	slow.Show([]event.Fault{flaps})
	are(t, client, "at first", "Warning NoEndpoints 1 web no endpoint: fix it")
	slow.Show(nil)
	are(t, client, "fixed", "Normal NoEndpoints 1 web Ended: no endpoint")
	slow.Show([]event.Fault{flaps})
	are(t, client, "back", "Warning NoEndpoints 2 web no endpoint: fix it")
	slow.Show([]event.Fault{marks}) // the other one is fixed, which is not told any more
	are(t, client, "too often", "Warning NoEndpoints 2 web no endpoint: fix it", "Warning SCTPNotServed 1 web port 80 is SCTP: fix it")

	client = fake.NewClientset()
	fresh := teller(t, client, "n1", event.Pace{Again: time.Millisecond, Refresh: 10 * time.Millisecond, Retry: time.Millisecond}, slog.New(slog.DiscardHandler))
	fresh.Show([]event.Fault{marks})
	settled()
	if all := list(t, client); len(all) != 1 || all[0].Count <= 2 {
		t.Fatalf("an Event whose fault holds is not told anew: %+v", all)
	}
}

// TestFailure has the apiserver refuse: that is logged once, and tried again.
func TestFailure(t *testing.T) { synctest.Test(t, testFailure) }

func testFailure(t *testing.T) {
	client := fake.NewClientset()
	var mutex sync.Mutex
	creates, updates := 0, 0
	client.PrependReactor("create", "events", func(ktesting.Action) (bool, runtime.Object, error) {
		mutex.Lock()
		defer mutex.Unlock()
		creates++
		return creates <= 3, nil, errors.New("no room")
	})
	client.PrependReactor("update", "events", func(ktesting.Action) (bool, runtime.Object, error) {
		mutex.Lock()
		defer mutex.Unlock()
		updates++
		return updates == 1, nil, apierrors.NewConflict(schema.GroupResource{Resource: "events"}, "web", errors.New("another agent"))
	})
	var out bytes.Buffer
	teller := event.New(client, "n1", quick, slog.New(slog.NewTextHandler(&out, nil)))
	ctx, cancel := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Go(func() { teller.Run(ctx) })
	teller.Show([]event.Fault{fault(translate.SCTPRefused, "port 80 is SCTP")})
	are(t, client, "after failures", "Warning SCTPNotServed 1 web port 80 is SCTP: fix it")
	teller.Show(nil)
	are(t, client, "after a conflict", "Normal SCTPNotServed 1 web Ended: port 80 is SCTP")
	cancel()
	ended.Wait()
	if strings.Count(out.String(), "could not make an Event") != 1 || !strings.Contains(out.String(), "no room") {
		t.Errorf("the log is\n%s", out.String())
	}
}

// TestReasons: each fault has a reason of its own.
func TestReasons(t *testing.T) { synctest.Test(t, testReasons) }

func testReasons(t *testing.T) {
	source, err := os.ReadFile("../translate/fault.go")
	if err != nil {
		t.Fatal(err)
	}
	codes := regexp.MustCompile(`Code = "(\w+)"`).FindAllStringSubmatch(string(source), -1)
	if len(codes) < 5 {
		t.Fatalf("the codes are not found: %v", codes)
	}
	seen := map[string]bool{}
	for _, code := range codes {
		client := fake.NewClientset()
		teller(t, client, "n1", quick, slog.New(slog.DiscardHandler)).Show([]event.Fault{fault(translate.Code(code[1]), "x")})
		settled()
		all := list(t, client)
		if len(all) != 1 {
			t.Fatalf("%s: %d Events", code[1], len(all))
		}
		if reason := all[0].Reason; reason == "" || seen[reason] {
			t.Errorf("%s has the reason %q", code[1], reason)
		} else {
			seen[reason] = true
		}
	}
}
