package source_test

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/kube/source"
)

type answering struct {
	err    error
	answer http.Response
}

func (a *answering) RoundTrip(*http.Request) (*http.Response, error) {
	if a.err != nil {
		return nil, a.err
	}
	return &a.answer, nil
}

func TestContact(t *testing.T) {
	k := &taker{}
	server := &answering{}
	wrapped := (&source.Contact{Log: slog.New(slog.NewTextHandler(k, nil))}).Wrap(server)
	ask := func(ctx context.Context) {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1/", nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = wrapped.RoundTrip(request)
	}
	given, up := context.WithCancel(context.Background())
	up()
	ask(context.Background())
	server.err = errors.New("refused")
	ask(given)
	if k.log.Len() > 0 {
		t.Errorf("a request that was given up counts: %s", k.log.String())
	}
	for range 3 {
		ask(context.Background())
	}
	server.err = nil
	for range 3 {
		ask(context.Background())
	}
	for _, once := range []string{"does not answer", "answers again"} {
		if got := strings.Count(k.log.String(), once); got != 1 {
			t.Errorf("%q is logged %d times:\n%s", once, got, k.log.String())
		}
	}
}
