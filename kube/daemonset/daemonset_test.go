package daemonset_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	fakes "k8s.io/client-go/testing"

	"github.com/shunt-lb/shunt/kube/daemonset"
)

const patience = 30 * time.Second

func follow(t *testing.T, client *fake.Clientset) *daemonset.Watch {
	t.Helper()
	w, err := daemonset.Follow(client, "kube-system/agent")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return w
}

func TestGone(t *testing.T) {
	client := fake.NewClientset(&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "agent"}})
	w := follow(t, client)
	if w.Gone(patience, slog.Default()) {
		t.Fatal("it is there, and counts as gone")
	}
	if err := client.AppsV1().DaemonSets("kube-system").Delete(t.Context(), "agent", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if !w.Gone(patience, slog.Default()) {
		t.Error("it was deleted, and counts as there")
	}
}

// TestLateWatch: the watch gets the deletion late, or not at all. The apiserver answers a question correctly.
func TestLateWatch(t *testing.T) {
	client := fake.NewClientset(&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "agent"}})
	client.PrependWatchReactor("daemonsets", func(fakes.Action) (bool, watch.Interface, error) { return true, watch.NewFake(), nil })
	w := follow(t, client)
	if w.Gone(patience, slog.Default()) {
		t.Fatal("it is there, and counts as gone")
	}
	if err := client.AppsV1().DaemonSets("kube-system").Delete(t.Context(), "agent", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if !w.Gone(patience, slog.Default()) {
		t.Error("it was deleted, and counts as there")
	}
}

// TestRightsAreGone: an uninstallation has removed the right to ask, and the watch gets the news a moment later.
func TestRightsAreGone(t *testing.T) {
	client := fake.NewClientset(&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "agent"}})
	refused := make(chan struct{}, 1)
	client.PrependReactor("get", "daemonsets", func(fakes.Action) (bool, runtime.Object, error) {
		select {
		case refused <- struct{}{}:
		default:
		}
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "daemonsets"}, "agent", errors.New("no rights"))
	})
	w := follow(t, client)
	go func() {
		<-refused
		_ = client.AppsV1().DaemonSets("kube-system").Delete(context.Background(), "agent", metav1.DeleteOptions{})
	}()
	if !w.Gone(patience, slog.Default()) {
		t.Error("the watch has heard that it is gone, and it counts as there")
	}
}

// TestBeingDeleted: with `kubectl delete --cascade=foreground` its pods go before it does.
func TestBeingDeleted(t *testing.T) {
	now := metav1.Now()
	client := fake.NewClientset(&appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "agent", DeletionTimestamp: &now,
		Finalizers: []string{metav1.FinalizerDeleteDependents}}})
	if !follow(t, client).Gone(patience, slog.Default()) {
		t.Error("it is being deleted, and counts as there")
	}
}

// TestNobodySays: without rights, or without an apiserver, the data plane stays.
func TestNobodySays(t *testing.T) {
	client := fake.NewClientset()
	client.PrependReactor("*", "daemonsets", func(fakes.Action) (bool, runtime.Object, error) { return true, nil, errors.New("forbidden") })
	var log bytes.Buffer
	if follow(t, client).Gone(50*time.Millisecond, slog.New(slog.NewTextHandler(&log, nil))) {
		t.Error("nobody has said that it is gone")
	}
	if !strings.Contains(log.String(), "shunt uninstall") {
		t.Errorf("the log is %q", log.String())
	}
}

func TestName(t *testing.T) {
	for _, key := range []string{"", "agent", "/agent", "kube-system/", "a/b/c"} {
		if w, err := daemonset.Follow(fake.NewClientset(), key); err == nil {
			w.Close()
			t.Errorf("%q is let in", key)
		}
	}
}
