package source_test

import (
	"fmt"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/shunt-lb/shunt/internal/lb/state"
	"github.com/shunt-lb/shunt/kube/translate"
)

// whole is the way of a change from its objects to the desired state.
type whole struct {
	translator translate.Translator
	set        translate.Set
	writer     *state.Writer
}

func newWhole(services int, addresses []string) *whole {
	w := &whole{writer: state.NewWriter()}
	for i := range services {
		w.put(i, addresses)
	}
	if err := w.declare(); err != nil {
		panic(err) // the test's own services
	}
	return w
}

func (w *whole) put(i int, addresses []string) {
	name := fmt.Sprintf("s%d", i)
	s := service(name, fmt.Sprintf("10.96.%d.%d", i/256, i%256))
	w.set.Put("default/"+name, time.Time{}, w.translator.Service(s, []*discoveryv1.EndpointSlice{slice(name, addresses...)}))
}

func (w *whole) declare() error {
	changed, withdrawn := w.set.Pending()
	_, err := w.writer.Replace(state.Declaration{Source: "kubernetes", Services: changed, Part: true, Withdrawn: withdrawn})
	w.set.Settled()
	return err
}
