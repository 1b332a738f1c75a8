package source

import (
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"

	"github.com/shunt-lb/shunt/internal/message"
)

// Configure sets a client of the apiserver up as a source needs it. The Contact hears how its requests go.
func Configure(settings *rest.Config, log *slog.Logger) *Contact {
	settings.UserAgent = "shunt-kube"
	settings.ContentType = runtime.ContentTypeProtobuf
	settings.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON // what aggregated apiservers have
	c := &Contact{Log: log, Server: settings.Host}
	settings.Wrap(c.Wrap)
	return c
}

// Contact logs when the apiserver stops answering, and when it answers again. Reflectors keep a
// refused connection to themselves.
type Contact struct {
	Log *slog.Logger
	// Server is where the apiserver is asked.
	Server string

	mutex   sync.Mutex
	away    time.Time         // since then it does not answer; zero: it does
	why     string            // it does not answer
	refuses map[string]string // lists that are followed, by path, and its answer in their place
}

// followed are the last parts of the paths of what is listed and watched.
var followed = []string{"services", "endpointslices", "nodes"}

// Wrap is for rest.Config.Wrap.
func (c *Contact) Wrap(next http.RoundTripper) http.RoundTripper { return &listener{c, next} }

type listener struct {
	contact *Contact
	next    http.RoundTripper
}

// RoundTrip passes a request on and hears how it goes.
func (l *listener) RoundTrip(request *http.Request) (*http.Response, error) {
	answer, err := l.next.RoundTrip(request)
	l.contact.hear(request, answer, err)
	return answer, err
}

func (c *Contact) hear(request *http.Request, answer *http.Response, err error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	switch {
	case err == nil:
		if !c.away.IsZero() {
			c.away, c.why = time.Time{}, ""
			c.Log.Info("the apiserver answers again")
		}
		c.note(request, answer)
	case request.Context().Err() != nil: // we have given it up ourselves
	case c.away.IsZero():
		c.away, c.why = time.Now(), message.Text(err.Error())
		c.Log.Warn("the apiserver does not answer; the services of its last answers stay in force", "error", err)
	}
}

// note keeps which lists the apiserver refuses.
func (c *Contact) note(request *http.Request, answer *http.Response) {
	at := request.URL.Path
	if request.Method != http.MethodGet || !slices.Contains(followed, path.Base(at)) {
		return
	}
	if answer.StatusCode < http.StatusBadRequest || answer.StatusCode == http.StatusGone { // a watch began too long ago, and a list follows
		delete(c.refuses, at)
		return
	}
	if c.refuses == nil {
		c.refuses = map[string]string{}
	}
	c.refuses[at] = message.Text(fmt.Sprintf("GET %s: %s", at, answer.Status))
}

// State is whether the apiserver answers. away is since when it does not, and zero if it does; why is the error then, or else the lists that
// it refuses. It is for any goroutine.
func (c *Contact) State() (away time.Time, why string) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if !c.away.IsZero() {
		return c.away, c.why
	}
	return c.away, strings.Join(slices.Sorted(maps.Values(c.refuses)), "; ")
}
