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

// Configure sets up a client of the apiserver as a source needs it. The Contact observes its requests.
func Configure(settings *rest.Config, log *slog.Logger) *Contact {
	settings.UserAgent = "shunt-kube"
	settings.ContentType = runtime.ContentTypeProtobuf
	settings.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON // aggregated apiservers support these
	c := &Contact{Log: log, Server: settings.Host}
	settings.Wrap(c.Wrap)
	return c
}

// Contact logs when the apiserver stops answering, and when it answers again. Reflectors keep a
// refused connection to themselves.
type Contact struct {
	Log *slog.Logger
	// Server is the address of the apiserver.
	Server string

	mutex   sync.Mutex
	away    time.Time         // since when it does not answer; zero: it answers
	why     string            // why it does not answer
	refuses map[string]string // its answers in place of the lists that are followed, by path
}

// followed are the last parts of the paths that are listed and watched.
var followed = []string{"services", "endpointslices", "nodes", "configmaps"}

// Wrap is meant for rest.Config.Wrap.
func (c *Contact) Wrap(next http.RoundTripper) http.RoundTripper { return &listener{c, next} }

type listener struct {
	contact *Contact
	next    http.RoundTripper
}

// RoundTrip passes a request on and observes its result.
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
	case request.Context().Err() != nil: // this process has given it up itself
	case c.away.IsZero():
		c.away, c.why = time.Now(), message.Text(err.Error())
		c.Log.Warn("the apiserver does not answer; the services of its last answers stay in force", "error", err)
	}
}

// note records the lists that the apiserver refuses.
func (c *Contact) note(request *http.Request, answer *http.Response) {
	at := request.URL.Path
	if request.Method != http.MethodGet || !slices.Contains(followed, path.Base(at)) {
		return
	}
	if answer.StatusCode < http.StatusBadRequest || answer.StatusCode == http.StatusGone { // Gone: a watch began too long ago, and a list follows
		delete(c.refuses, at)
		return
	}
	if c.refuses == nil {
		c.refuses = map[string]string{}
	}
	c.refuses[at] = message.Text(fmt.Sprintf("GET %s: %s", at, answer.Status))
}

// State reports whether the apiserver answers. away is the time since when it does not, and zero if it does; why is the error then, or otherwise the lists that
// it refuses. It is for any goroutine.
func (c *Contact) State() (away time.Time, why string) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if !c.away.IsZero() {
		return c.away, c.why
	}
	return c.away, strings.Join(slices.Sorted(maps.Values(c.refuses)), "; ")
}
