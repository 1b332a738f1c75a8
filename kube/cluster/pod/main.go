// Command pod runs in the pods of a test cluster.
//
//	pod pause    hold a pod's namespaces
//	pod serve    HTTP on port 8080, and UDP on 5353: the server's name, and the address that was asked
//	pod load     the same, and on port 9000 the server of package traffic; it needs a privileged container
//
// A server also asks for a client that is elsewhere: GET /ask?network=tcp&address=10.96.0.10:80 opens a
// connection from the pod, and returns the answer that it gets. GET /hold?address=… opens a TCP connection that stays open, and
// GET /held?connection=N asks once more on it, where N is the answer of /hold. GET /kernel is the release of the pod's kernel.
//
// A load's client: GET /measure?kind=TCP_CRR&address=10.96.0.10:9000&duration=2s measures from the pod (package meter), and
// GET /until?address=10.96.0.10:80&backend=NAME&limit=30s opens connections until that backend answers.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
)

// patience limits the wait for an answer from the next network.
const patience = 2 * time.Second

func main() {
	what := ""
	if len(os.Args) > 1 {
		what = os.Args[1]
	}
	var err error
	switch what {
	case "pause":
		pause()
	case "serve":
		err = serve(nil)
	case "load":
		err = serveLoad()
	default:
		err = fmt.Errorf("%q is not one of pause, serve, load", what)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "pod:", err)
		os.Exit(1)
	}
}

// pause ends at a signal. Until then it waits for orphaned processes.
func pause() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for s := range signals {
		if s != syscall.SIGCHLD {
			return
		}
		for {
			if pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
}

// serve also serves additional paths.
func serve(more map[string]http.HandlerFunc) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	datagrams, err := net.ListenPacket("udp", ":5353")
	if err != nil {
		return err
	}
	ended := make(chan error, 2)
	go func() { ended <- echo(datagrams, name) }()
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
		reply(w, lab.Answer{Backend: name, Remote: r.RemoteAddr, Local: local.String(), Path: r.URL.Path}, nil)
	})
	mux.HandleFunc("GET /ask", func(w http.ResponseWriter, r *http.Request) {
		answer, err := ask(r.Context(), r.FormValue("network"), r.FormValue("address"))
		reply(w, answer, err)
	})
	mux.HandleFunc("GET /kernel", func(w http.ResponseWriter, _ *http.Request) {
		var name unix.Utsname
		err := unix.Uname(&name)
		reply(w, unix.ByteSliceToString(name.Release[:]), err)
	})
	held := &connections{}
	mux.HandleFunc("GET /hold", held.hold)
	mux.HandleFunc("GET /held", held.ask)
	for pattern, handler := range more {
		mux.HandleFunc(pattern, handler)
	}
	go func() { ended <- http.ListenAndServe(":8080", mux) }()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return nil
	}
}

func reply(w http.ResponseWriter, answer any, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer) // fails if the client has gone
}

// ask asks once, from a new socket.
func ask(ctx context.Context, network, address string) (lab.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if network == "tcp" {
		return lab.Get(ctx, &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}, address)
	}
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return lab.Answer{}, err
	}
	defer conn.Close()
	return lab.AskUDPOn(ctx, conn, []byte("who?"))
}

// connections stay open until the server ends.
type connections struct {
	mutex sync.Mutex
	all   []*lab.Session
}

func (c *connections) hold(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", r.FormValue("address"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.all = append(c.all, lab.NewSession(conn))
	fmt.Fprint(w, len(c.all)-1)
}

func (c *connections) ask(w http.ResponseWriter, r *http.Request) {
	n, err := strconv.Atoi(r.FormValue("connection"))
	c.mutex.Lock()
	if err == nil && (n < 0 || n >= len(c.all)) {
		err = fmt.Errorf("connection %d of %d", n, len(c.all))
	}
	if err != nil {
		c.mutex.Unlock()
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	session := c.all[n]
	c.mutex.Unlock()
	ctx, cancel := context.WithTimeout(r.Context(), patience)
	defer cancel()
	answer, err := session.Ask(ctx, "/")
	reply(w, answer, err)
}

// echo answers each datagram with the server's name, the client's address, and the datagram.
func echo(conn net.PacketConn, name string) error {
	buffer := make([]byte, 2048)
	for {
		n, from, err := conn.ReadFrom(buffer)
		if err != nil {
			return err
		}
		answer := append([]byte(name+"\n"+from.String()+"\n"), buffer[:n]...)
		_, _ = conn.WriteTo(answer, from) // the client may have gone
	}
}
