package source_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/shunt-lb/shunt/kube/source"
)

// encoded is an EndpointSlice with 100 endpoints, as an apiserver sends it.
func encoded(tb testing.TB, media string) []byte {
	tb.Helper()
	var addresses []string
	for i := range 100 {
		addresses = append(addresses, fmt.Sprintf("10.244.%d.%d", i/100, 1+i))
	}
	info, known := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), media)
	if !known {
		tb.Fatalf("nobody knows %s", media)
	}
	var text bytes.Buffer
	s := slice("web", addresses...)
	if err := scheme.Codecs.EncoderForVersion(info.Serializer, discoveryv1.SchemeGroupVersion).Encode(s, &text); err != nil {
		tb.Fatal(err)
	}
	return text.Bytes()
}

// TestConfigure: the apiserver is asked for protobuf, and an answer in it or in JSON is understood.
func TestConfigure(t *testing.T) {
	for _, media := range []string{runtime.ContentTypeProtobuf, runtime.ContentTypeJSON} {
		accepted := make(chan string, 1)
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			accepted <- r.Header.Get("Accept")
			w.Header().Set("Content-Type", media)
			_, _ = w.Write(encoded(t, media))
		}))
		settings := &rest.Config{Host: server.URL}
		source.Configure(settings, slog.New(slog.DiscardHandler))
		client, err := kubernetes.NewForConfig(settings)
		if err != nil {
			t.Fatal(err)
		}
		got, err := client.DiscoveryV1().EndpointSlices("default").Get(t.Context(), "web", metav1.GetOptions{})
		if err != nil || len(got.Endpoints) != 100 {
			t.Errorf("an answer in %s: %d endpoints, %v", media, len(got.Endpoints), err)
		}
		if accept := <-accepted; accept != "application/vnd.kubernetes.protobuf,application/json" {
			t.Errorf("it accepts %q", accept)
		}
		server.Close()
	}
}

// BenchmarkDecode is the cost of decoding an EndpointSlice with 100 endpoints.
func BenchmarkDecode(b *testing.B) {
	for _, media := range []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf} {
		b.Run(media, func(b *testing.B) {
			text := encoded(b, media)
			decoder := scheme.Codecs.UniversalDeserializer()
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				if _, _, err := decoder.Decode(text, nil, nil); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
