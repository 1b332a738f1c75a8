package source_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/shunt-lb/shunt/kube/source"
)

// TestAskWithoutRights: a command that has no rights says so at once, with the apiserver's answer and the remedy; an
// agent goes on asking.
func TestAskWithoutRights(t *testing.T) {
	for _, refusal := range []*apierrors.StatusError{
		apierrors.NewForbidden(schema.GroupResource{Resource: "endpointslices"}, "", nil), apierrors.NewUnauthorized("who is this?"),
	} {
		client := fake.NewClientset()
		client.PrependReactor("list", "endpointslices", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, refusal })
		open := func(which func(*source.Source, context.Context) error, patience time.Duration) error {
			s, err := source.New(source.Options{Client: client, Node: "n1", Log: slog.New(slog.DiscardHandler)})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			err = which(s, ctx)
			if err == nil {
				t.Fatal("it has read what it may not")
			}
			return err
		}
		err := open((*source.Source).Ask, time.Hour)
		for _, want := range []string{`read Services, EndpointSlices and Node "n1": the apiserver refuses to show them`, refusal.Error(), "role.yaml"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("the error is %q, and lacks %q", err, want)
			}
		}
		if err := open((*source.Source).Open, 50*time.Millisecond); !strings.Contains(err.Error(), context.DeadlineExceeded.Error()) {
			t.Errorf("an agent gives up: %v", err)
		}
	}
}
