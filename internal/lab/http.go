package lab

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"
)

// Answer is the answer of the lab's servers to a request.
type Answer struct {
	Backend string `json:"backend"` // the server's name
	Remote  string `json:"remote"`  // the client's address and port as the server saw them
	Local   string `json:"local"`   // the address and port the request arrived at
	Path    string `json:"path"`
}

// checksumTrailer carries the SHA-256 of a body, in hex, after it.
const checksumTrailer = "X-Body-Sha256"

// HTTPServer is a web server on a host:
//
//	GET  /…          Answer as JSON; the backend's name also in the header X-Backend
//	GET  /bytes?n=N  N bytes that look random, their SHA-256 in a trailer
//	POST /bytes      reads a body and answers with its SHA-256 in hex
type HTTPServer struct {
	Name     string
	server   *http.Server
	listener net.Listener

	requests    atomic.Int64
	connections atomic.Int64
}

// ServeHTTP starts a web server on a literal address, "10.0.0.2:80" or "[::]:80". It ends
// with Close of it or of the lab.
func (h *Host) ServeHTTP(address, name string) (*HTTPServer, error) {
	listener, err := h.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("serve http: %w", err)
	}
	s := &HTTPServer{Name: name, listener: listener}
	mux := http.NewServeMux()
	mux.HandleFunc("/", s.answer)
	mux.HandleFunc("GET /bytes", s.sendBytes)
	mux.HandleFunc("POST /bytes", s.takeBytes)
	s.server = &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: time.Minute,
		ErrorLog:          log.New(io.Discard, "", 0), // labs break connections on purpose
		ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateNew {
				s.connections.Add(1)
			}
		},
	}
	go s.server.Serve(listener)
	h.lab.atClose(s.Close)
	return s, nil
}

// Addr is the address at which it listens.
func (s *HTTPServer) Addr() net.Addr { return s.listener.Addr() }

// Requests counts the requests that have begun, of any path.
func (s *HTTPServer) Requests() int64 { return s.requests.Load() }

// Connections counts the accepted connections.
func (s *HTTPServer) Connections() int64 { return s.connections.Load() }

// Close ends the server and its connections. It may be called again.
func (s *HTTPServer) Close() error {
	if err := s.server.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("close http server %s: %w", s.Name, err)
	}
	return nil
}

func (s *HTTPServer) answer(w http.ResponseWriter, r *http.Request) {
	s.requests.Add(1)
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Backend", s.Name)
	json.NewEncoder(w).Encode(Answer{Backend: s.Name, Remote: r.RemoteAddr, Local: fmt.Sprint(local), Path: r.URL.Path})
}

// noise is a stream of bytes in which every mistake of a checksum shows, the same every time.
func noise(size int64) io.Reader {
	return io.LimitReader(rand.NewChaCha8([32]byte{'s', 'h', 'u', 'n', 't'}), size)
}

func (s *HTTPServer) sendBytes(w http.ResponseWriter, r *http.Request) {
	s.requests.Add(1)
	size, err := strconv.ParseInt(r.URL.Query().Get("n"), 10, 64)
	if err != nil || size < 0 {
		http.Error(w, "n must be a number of bytes", http.StatusBadRequest)
		return
	}
	w.Header().Set("Trailer", checksumTrailer)
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("X-Backend", s.Name)
	hash := sha256.New()
	if _, err := io.CopyBuffer(onlyWriter{w}, io.TeeReader(noise(size), hash), make([]byte, 64<<10)); err != nil {
		panic(http.ErrAbortHandler) // the client must not take half a body for a whole one
	}
	w.Header().Set(checksumTrailer, hex.EncodeToString(hash.Sum(nil)))
}

// onlyWriter hides ReadFrom, so that the copy uses the buffer it was given.
type onlyWriter struct{ io.Writer }

func (s *HTTPServer) takeBytes(w http.ResponseWriter, r *http.Request) {
	s.requests.Add(1)
	hash := sha256.New()
	if _, err := io.Copy(hash, r.Body); err != nil {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("X-Backend", s.Name)
	fmt.Fprintln(w, hex.EncodeToString(hash.Sum(nil)))
}

// HTTPClient is a client whose connections come from the host. With keepAlive, requests
// share connections; without, each has its own and so its own source port. The caller sets
// deadlines through the requests' contexts.
func (h *Host) HTTPClient(keepAlive bool) *http.Client {
	transport := &http.Transport{
		DialContext:         h.Dial,
		DisableKeepAlives:   !keepAlive,
		DisableCompression:  true,
		MaxIdleConnsPerHost: 1024,
		ReadBufferSize:      64 << 10,
	}
	h.lab.atClose(func() error { transport.CloseIdleConnections(); return nil })
	return &http.Client{Transport: transport}
}

// Get asks a server of the lab at a literal address and port for its name.
func Get(ctx context.Context, client *http.Client, address string) (Answer, error) {
	var a Answer
	response, err := do(ctx, client, http.MethodGet, "http://"+address+"/", nil)
	if err != nil {
		return a, err
	}
	defer response.Body.Close()
	if err := json.NewDecoder(response.Body).Decode(&a); err != nil {
		return a, fmt.Errorf("get http://%s/: read the answer: %w", address, err)
	}
	_, err = io.Copy(io.Discard, response.Body) // so that the connection can be used again
	return a, err
}

// Download fetches size bytes and checks every one of them; it gives the server's name.
func Download(ctx context.Context, client *http.Client, address string, size int64) (backend string, err error) {
	response, err := do(ctx, client, http.MethodGet, fmt.Sprintf("http://%s/bytes?n=%d", address, size), nil)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	hash := sha256.New()
	got, err := io.Copy(hash, response.Body)
	if err != nil {
		return "", fmt.Errorf("download %d bytes from %s: after %d: %w", size, address, got, err)
	}
	sum, want := hex.EncodeToString(hash.Sum(nil)), response.Trailer.Get(checksumTrailer)
	if got != size || sum != want {
		return "", fmt.Errorf("download %d bytes from %s: got %d with sha256 %s, the server sent %s", size, address, got, sum, want)
	}
	return response.Header.Get("X-Backend"), nil
}

// Upload sends size bytes and checks that the server got every one of them; it gives the
// server's name.
func Upload(ctx context.Context, client *http.Client, address string, size int64) (backend string, err error) {
	hash := sha256.New()
	response, err := do(ctx, client, http.MethodPost, "http://"+address+"/bytes", io.TeeReader(noise(size), hash))
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	var got string
	if _, err := fmt.Fscan(response.Body, &got); err != nil {
		return "", fmt.Errorf("upload %d bytes to %s: read the answer: %w", size, address, err)
	}
	if want := hex.EncodeToString(hash.Sum(nil)); got != want {
		return "", fmt.Errorf("upload %d bytes to %s: sent sha256 %s, the server got %s", size, address, want, got)
	}
	return response.Header.Get("X-Backend"), nil
}

// do is one request that must be answered with 200.
func do(ctx context.Context, client *http.Client, method, url string, body io.Reader) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, url, err)
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, err // names method and URL itself
	}
	if response.StatusCode != http.StatusOK {
		response.Body.Close()
		return nil, fmt.Errorf("%s %s: the server answered %s", method, url, response.Status)
	}
	return response, nil
}
