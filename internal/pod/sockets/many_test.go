package sockets_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// crowdVariable makes this binary a process with many clients: it has the server's address, and their number.
const crowdVariable = "SHUNT_TEST_SOCKET_CLIENTS"

func TestMain(m *testing.M) {
	if wanted := os.Getenv(crowdVariable); wanted != "" {
		if err := crowd(wanted); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// crowd connects so many times, prints that, and at a line from outside has each connection carry its number there and
// back.
func crowd(wanted string) error {
	address, number, _ := strings.Cut(wanted, " ")
	count, err := strconv.Atoi(number)
	if err != nil {
		return err
	}
	clients := make([]net.Conn, count)
	for i := range clients {
		if clients[i], err = net.DialTimeout("tcp", address, patience); err != nil {
			return fmt.Errorf("connection %d: %w", i, err)
		}
	}
	fmt.Println("connected")
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		return err
	}
	deadline(clients...)
	for i, c := range clients {
		if _, err := fmt.Fprintf(c, "%08d", i); err != nil {
			return fmt.Errorf("connection %d: %w", i, err)
		}
	}
	for i, c := range clients {
		text := make([]byte, 8)
		if _, err := io.ReadFull(c, text); err != nil || string(text) != fmt.Sprintf("%08d", i) {
			return fmt.Errorf("connection %d gets %q back, %w", i, text, err)
		}
	}
	fmt.Println("done")
	return nil
}

// 10,000 connections at a time are all paired, and all carry. Clients and servers are two processes, because a machine
// may allow a process no more than 20,000 descriptors.
func TestManyConnections(t *testing.T) {
	connections := 10_000
	if testing.Short() {
		connections = 1000
	}
	w := newPaired(t)
	l, err := w.Pods[1].Listen("tcp", netip.AddrPortFrom(w.Address(1, false), 0).String())
	w.must(err)
	defer l.Close() //nolint:errcheck // of the test
	self, err := os.Executable()
	w.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	clients := w.Pods[0].Command(ctx, self)
	clients.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d", crowdVariable, l.Addr(), connections))
	clients.Stderr = os.Stderr
	in, err := clients.StdinPipe()
	w.must(err)
	out, err := clients.StdoutPipe()
	w.must(err)
	w.must(clients.Start())
	ended := false
	defer func() {
		if !ended {
			cancel()
			_ = clients.Wait() // it is killed
		}
	}()
	servers := make([]net.Conn, 0, connections)
	defer func() {
		for _, s := range servers {
			_ = s.Close() // of the test
		}
	}()
	for range connections {
		w.must(l.(*net.TCPListener).SetDeadline(time.Now().Add(patience)))
		s, err := l.Accept()
		w.must(err)
		servers = append(servers, s)
	}
	lines := bufio.NewScanner(out)
	says := func(want string) {
		t.Helper()
		if !lines.Scan() || lines.Text() != want {
			t.Fatalf("the clients say %q, want %q: %v", lines.Text(), want, errors.Join(lines.Err(), clients.Wait()))
		}
	}
	says("connected")
	if n, _, err := w.Paired(); n != 2*connections || err != nil {
		t.Errorf("%d sockets are in the map, %v; %d connections", n, err, connections)
	}
	_, err = io.WriteString(in, "go\n")
	w.must(err)
	deadline(servers...)
	said := map[string]bool{}
	for i, s := range servers {
		text := make([]byte, 8)
		if _, err := io.ReadFull(s, text); err != nil || said[string(text)] {
			t.Fatalf("connection %d carries %q, %v", i, text, err)
		}
		said[string(text)] = true
		_, err := s.Write(text)
		w.must(err)
	}
	says("done")
	ended = true
	w.must(clients.Wait())
	if n := w.count("taken"); n != uint64(2*connections) {
		counts, _ := w.Counts()
		t.Errorf("%d messages of %d were redirected: %v", n, 2*connections, counts)
	}
	t.Logf("%d connections", connections)
}
