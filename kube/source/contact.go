package source

import (
	"log/slog"
	"net/http"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
)

// Configure sets a client of the apiserver up as a source needs it.
func Configure(settings *rest.Config, log *slog.Logger) {
	settings.UserAgent = "shunt-kube"
	settings.ContentType = runtime.ContentTypeProtobuf
	settings.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON // what aggregated apiservers have
	settings.Wrap((&Contact{Log: log}).Wrap)
}

// Contact logs when the apiserver stops answering, and when it answers again. Reflectors keep a
// refused connection to themselves.
type Contact struct {
	Log  *slog.Logger
	away atomic.Bool
}

// Wrap is for rest.Config.Wrap.
func (c *Contact) Wrap(next http.RoundTripper) http.RoundTripper { return &listener{c, next} }

type listener struct {
	contact *Contact
	next    http.RoundTripper
}

// RoundTrip passes a request on and hears how it goes.
func (l *listener) RoundTrip(request *http.Request) (*http.Response, error) {
	answer, err := l.next.RoundTrip(request)
	switch away := &l.contact.away; {
	case err == nil:
		if away.CompareAndSwap(true, false) {
			l.contact.Log.Info("the apiserver answers again")
		}
	case request.Context().Err() != nil: // we have given it up ourselves
	case away.CompareAndSwap(false, true):
		l.contact.Log.Warn("the apiserver does not answer; services stay as it has said last", "error", err)
	}
	return answer, err
}
