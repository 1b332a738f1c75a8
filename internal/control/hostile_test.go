package control

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/api/v1/shuntv1connect"
	"google.golang.org/protobuf/proto"
)

// answers requires that a well-behaved client is served while others are not.
func answers(t *testing.T, path, when string) {
	t.Helper()
	for _, p := range []string{path, ReadSocket(path)} {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		if _, err := NewClient(p).Status(ctx); err != nil {
			t.Errorf("%s, %s: %v", when, p, err)
		}
		cancel()
	}
}

// TestManyConnections opens a thousand on each socket, says nothing, a byte, half a header, or
// a header without its body, and keeps them open.
func TestManyConnections(t *testing.T) {
	t.Parallel()
	const header = "POST /shunt.v1.ControlService/Reload HTTP/1.1\r\nHost: shunt\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
	for name, text := range map[string]string{
		"nothing": "", "a byte": "P", "half a header": header[:40], "half a body": header,
		"HTTP/2": http2Preface, "half of HTTP/2": http2Preface[:10], "noise": "\x00\xff\x00\n\n\n",
	} {
		t.Run(name, func(t *testing.T) {
			f := &fake{}
			path, _ := serve(t, f)
			var open []net.Conn
			defer func() {
				for _, c := range open {
					c.Close()
				}
			}()
			for range 1000 {
				for _, p := range []string{path, ReadSocket(path)} {
					c, err := net.Dial("unix", p)
					if err != nil {
						t.Fatalf("connection %d: %v", len(open), err)
					}
					open = append(open, c)
					_, _ = io.WriteString(c, text) // it may be displaced already
				}
			}
			answers(t, path, "with 1,000 connections that say "+name)
			if f.reloads != 0 {
				t.Errorf("%d reloads from half a request", f.reloads)
			}
			var closed atomic.Int64
			for _, c := range open {
				go func() {
					_, _ = io.Copy(io.Discard, c)
					closed.Add(1)
				}()
			}
			want := int64(len(open) - 2*connectionsMax)
			for begin := time.Now(); closed.Load() < want; time.Sleep(10 * time.Millisecond) {
				if time.Since(begin) > 20*time.Second {
					t.Fatalf("%d of %d connections were closed, %d should be", closed.Load(), len(open), want)
				}
			}
		})
	}
}

// http2Preface opens an HTTP/2 connection (RFC 9113, section 3.4), with empty settings.
const http2Preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"

// TestReaderThatNeverReads asks for answers larger than any buffer between.
func TestReaderThatNeverReads(t *testing.T) {
	t.Parallel()
	path, _ := serve(t, &fake{services: 5_000})
	for range 2 * connectionsMax {
		c, err := net.Dial("unix", ReadSocket(path))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, _ = io.WriteString(c, "POST /shunt.v1.StatusService/GetStatus HTTP/1.1\r\nHost: shunt\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
	}
	answers(t, path, "with many that do not read")
}

// TestWriteEnds gives a client that does not read its time, and then no more time.
func TestWriteEnds(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("it takes as long as a client may")
	}
	path, _ := serve(t, &fake{services: 5_000})
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = io.WriteString(c, "POST /shunt.v1.StatusService/GetStatus HTTP/1.1\r\nHost: shunt\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
	begin := time.Now()
	// To write is to wait until the server closes its end.
	for {
		if _, err := c.Write([]byte{'\n'}); err != nil {
			break
		}
		if time.Since(begin) > 6*writeTimeout {
			t.Fatalf("the connection is open after %s", time.Since(begin))
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// watch opens a stream by hand, and sends no other request.
func watch(t *testing.T, path string) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	envelope := make([]byte, 5)
	body, _ := proto.Marshal(&shuntv1.WatchRequest{})
	binary.BigEndian.PutUint32(envelope[1:], uint32(len(body)))
	fmt.Fprintf(c, "POST /shunt.v1.StatusService/Watch HTTP/1.1\r\nHost: shunt\r\nContent-Type: application/connect+proto\r\nContent-Length: %d\r\n\r\n%s%s",
		len(envelope)+len(body), envelope, body)
	return c
}

// TestWatch sees the conditions that hold, their changes, and the end.
func TestWatch(t *testing.T) {
	path, events := serve(t, &fake{})
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	h2 := httpClient(path)
	h2.Timeout = 0
	h2.Transport.(*http.Transport).Protocols = &protocols
	for name, client := range map[string]shuntv1connect.StatusServiceClient{
		"connect": shuntv1connect.NewStatusServiceClient(httpClient(path), "http://shunt"),
		"gRPC":    shuntv1connect.NewStatusServiceClient(h2, "http://shunt", connect.WithGRPC()),
	} {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		stream, err := client.Watch(ctx, connect.NewRequest(&shuntv1.WatchRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		if !stream.Receive() || stream.Msg().Event != "watching" {
			t.Fatalf("%s: first came %v, %v", name, stream.Msg(), stream.Err())
		}
		if !stream.Receive() || stream.Msg().Event != "condition" || stream.Msg().Condition.Subject != "web" {
			t.Fatalf("%s: then came %v, %v", name, stream.Msg(), stream.Err())
		}
		events.Publish(&shuntv1.WatchResponse{Event: "changed"})
		if !stream.Receive() || stream.Msg().Event != "changed" {
			t.Errorf("%s: then came %v, %v", name, stream.Msg(), stream.Err())
		}
		_ = stream.Close()
	}
	if r, err := shuntv1connect.NewControlServiceClient(h2, "http://shunt", connect.WithGRPC()).Reload(context.Background(), connect.NewRequest(&shuntv1.ReloadRequest{})); err != nil || !r.Msg.Applied {
		t.Errorf("a call over gRPC: %v, %v", r, err)
	}
}

// TestSlowWatcher never reads: nobody waits for it, and it is told why its stream ends.
func TestSlowWatcher(t *testing.T) {
	path, events := serve(t, &fake{})
	c := watch(t, path)
	reader := bufio.NewReader(c)
	if line, err := reader.ReadString('\n'); err != nil || !strings.Contains(line, "200 OK") { // it is being served
		t.Fatalf("%q, %v", line, err)
	}
	big := &shuntv1.WatchResponse{Event: strings.Repeat("x", 8<<10)}
	begin := time.Now()
	for range 4 * behindMax { // several times the room of the buffers
		events.Publish(big)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("to publish took %s: somebody waited for the slow one", took)
	}
	answers(t, path, "with a watcher that does not read")
	_ = c.SetReadDeadline(time.Now().Add(30 * time.Second))
	var rest []byte
	for piece := make([]byte, 64<<10); !bytes.Contains(rest, []byte("events behind")); {
		n, err := reader.Read(piece)
		if rest = append(rest[max(0, len(rest)-1000):], piece[:n]...); err != nil {
			t.Fatalf("the stream ended with %v, and did not say that it was too slow: ...%.200q", err, rest)
		}
	}
}

// TestManyWatchers bounds their number, and admits one when another goes.
func TestManyWatchers(t *testing.T) {
	path, _ := serve(t, &fake{})
	// Up to the words that tell the outcome; a single octet, such as that of the end, may be in any
	// timestamp.
	status := func(c net.Conn) string {
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
		text := ""
		for b := make([]byte, 4096); !strings.Contains(text, "room for no more") && !strings.Contains(text, "web"); {
			n, err := c.Read(b)
			text += string(b[:n])
			if err != nil {
				break
			}
		}
		return text
	}
	var all []net.Conn
	for range watchersMax {
		c := watch(t, path)
		if text := status(c); !strings.Contains(text, "web") {
			t.Fatalf("watcher %d: %q", len(all), text)
		}
		all = append(all, c)
	}
	if text := status(watch(t, path)); !strings.Contains(text, "room for no more") {
		t.Errorf("one too many: %q", text)
	}
	answers(t, path, "with as many watchers as there may be")
	all[0].Close()
	for begin := time.Now(); ; {
		if text := status(watch(t, path)); strings.Contains(text, "web") {
			break
		} else if time.Since(begin) > 20*time.Second {
			t.Fatalf("nobody is let in after one has gone: %q", text)
		}
	}
}

// FuzzRequest sends anything to any procedure: every answer has the API's own form, and the
// requests that reach the daemon are within its bounds.
func FuzzRequest(f *testing.F) {
	procedures := []string{"StatusService/GetStatus", "StatusService/ListBackends", "StatusService/ListOverrides", "ControlService/Reload",
		"ControlService/DrainBackend", "ControlService/UndrainBackend", "ControlService/SetBackendWeight",
		"ControlService/SetBackendHealth", "ControlService/ClearOverrides"}
	kinds := []string{jsonType, "application/proto", formType, "application/grpc+proto", "application/grpc-web+json", "application/connect+json", "text/plain", ""}
	for i, body := range []string{`{}`, ``, `{"backend": "10.0.0.2", "weight": 70000}`, `{"backend": "a", "deadline": "1e99s"}`, `{"kinds": ["drain"], "all": true}`,
		"\x0a\x04web1\x10\x01", "\x00\x00\x00\x00\x02\x0a\x00", `{"backend": {"backend": 1}}`, `{"health": "up", "backend": "\ud800"}`} {
		for k := range kinds {
			f.Add(uint8(i), uint8(k), []byte(body))
		}
	}
	daemon := &fake{}
	path, _ := serve(f, daemon)
	client := httpClient(path)
	client.Transport.(*http.Transport).DisableKeepAlives = false
	f.Fuzz(func(t *testing.T, procedure, kind uint8, body []byte) {
		r, err := http.NewRequest(http.MethodPost, "http://shunt/shunt.v1."+procedures[int(procedure)%len(procedures)], bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", kinds[int(kind)%len(kinds)])
		response, err := client.Do(r)
		if err != nil {
			t.Fatalf("no answer: %v", err)
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatalf("the answer broke off: %v", err)
		}
		if response.StatusCode == 500 || bytes.Contains(text, []byte("panic")) {
			t.Errorf("%d %s", response.StatusCode, text)
		}
		daemon.mu.Lock()
		defer daemon.mu.Unlock()
		for _, o := range daemon.asked {
			if o.Kind == KindHealth && o.Health != "up" && o.Health != "down" || o.Deadline < 0 {
				t.Errorf("the daemon was told %+v", o)
			}
		}
		daemon.asked, daemon.cleared = nil, nil
	})
}
