package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"github.com/shunt-lb/shunt/internal/lab"
)

// backendReady is the line a backend prints when its servers listen.
const backendReady = "ready"

// ServeBackend is a backend's side: a web server and a UDP server that answer with the backend's
// name in JSON, on every address of the namespace that it was started in. It ends with ctx
// or, unless in is nil, with the end of in.
func ServeBackend(ctx context.Context, name string, in io.Reader, out io.Writer) error {
	listener, err := net.Listen("tcp", fmt.Sprintf(":%d", serverPort))
	if err != nil {
		return fmt.Errorf("serve HTTP: %w", err)
	}
	packets, err := net.ListenPacket("udp4", fmt.Sprintf("0.0.0.0:%d", echoPort))
	if err != nil {
		return fmt.Errorf("serve UDP: %w", err)
	}
	// A socket of each family: an answer from a socket of both would name its address anew.
	packets6, err := net.ListenPacket("udp6", fmt.Sprintf("[::]:%d", echoPort))
	if err != nil {
		return fmt.Errorf("serve UDP: %w", err)
	}
	server := &http.Server{Handler: whoAmI(name)}
	go server.Serve(listener) //nolint:errcheck // ends with the process
	go echo(packets, name)
	go echo(packets6, name)
	if _, err := fmt.Fprintln(out, backendReady); err != nil {
		return err
	}
	if in != nil {
		_, err = io.Copy(io.Discard, in)
		return err
	}
	<-ctx.Done()
	return nil
}

func whoAmI(name string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Backend", name)
		_ = json.NewEncoder(w).Encode(lab.Answer{Backend: name, Remote: r.RemoteAddr, Local: fmt.Sprint(local), Path: r.URL.Path})
	})
}

// echo answers as the lab's UDP server does.
func echo(packets net.PacketConn, name string) {
	buffer := make([]byte, 1<<16)
	for {
		n, from, err := packets.ReadFrom(buffer)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // an ICMP error about an earlier answer
		}
		answer := append([]byte(name+"\n"+from.String()+"\n"), buffer[:n]...)
		_, _ = packets.WriteTo(answer, from) // a lost answer is for the client to notice
	}
}
