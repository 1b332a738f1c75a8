package udp

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/udp/proto"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// fake is a broker that greets, and then does as the test wants.
func fake(t *testing.T, do func(*proto.Conn) error) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	must(t, err)
	done := make(chan error, 1)
	go func() {
		c, err := l.AcceptUnix()
		if err != nil {
			done <- err
			return
		}
		conn := proto.NewConn(c)
		if _, _, _, err = conn.Receive(time.Now().Add(10 * time.Second)); err == nil {
			err = do(conn)
		}
		done <- errors.Join(err, conn.Close())
	}()
	t.Cleanup(func() { must(t, <-done); must(t, l.Close()) })
	return path
}

func TestBrokersThatGiveNothing(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	open := func(path, name string) error {
		_, err := Open(ctx, Options{Socket: path, Name: name})
		return err
	}
	if err := open(filepath.Join(t.TempDir(), "none"), "a"); err == nil || !strings.Contains(err.Error(), "does it run, and does this program see its socket?") {
		t.Errorf("no broker: %v", err)
	}
	if err := open("", strings.Repeat("a", 64)); err == nil || !strings.Contains(err.Error(), "up to 63 bytes") {
		t.Errorf("a long name: %v", err)
	}
	if err := open(fake(t, func(*proto.Conn) error { return nil }), "a"); !errors.Is(err, ErrBrokerGone) {
		t.Errorf("a broker that goes: %v", err)
	}
	end := &proto.End{Code: proto.EndRefused}
	proto.Put(end.Text[:], "no")
	var ended *Ended
	if err := open(fake(t, func(c *proto.Conn) error { return c.Send(end, time.Second) }), "a"); !errors.As(err, &ended) || ended.Code != "refused" || ended.Text != "no" {
		t.Errorf("a broker that refuses: %v", err)
	}
	if err := open(fake(t, func(c *proto.Conn) error { return c.Send(&proto.Serving{}, time.Second) }), "a"); err == nil || !strings.Contains(err.Error(), "another protocol") {
		t.Errorf("a broker that confuses: %v", err)
	}
}

// The context ends Open also while the broker is silent.
func TestOpenEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	path := fake(t, func(c *proto.Conn) error {
		cancel()
		_, _, _, _ = c.Receive(time.Now().Add(10 * time.Second)) // until the client goes
		return nil
	})
	if _, err := Open(ctx, Options{Socket: path, Name: "a"}); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// A broker that does not take reports gets none. It may be older than this package.
func TestRenewalsAreAsTheBrokerTakesThem(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	must(t, err)
	defer l.Close() //nolint:errcheck // it has accepted
	conn, err := proto.Dial(context.Background(), path)
	must(t, err)
	defer conn.Close() //nolint:errcheck // it has sent
	c, err := l.AcceptUnix()
	must(t, err)
	broker := proto.NewConn(c)
	defer broker.Close() //nolint:errcheck // it has received
	for _, reports := range []bool{false, true} {
		lease := &Lease{conn: conn, number: 7, reports: reports}
		_, err := lease.ask()
		must(t, err)
		body, _, _, err := broker.Receive(time.Now().Add(10 * time.Second))
		must(t, err)
		switch m := body.(type) {
		case *proto.Renew:
			if reports || m.Lease != 7 || m.Sequence != 1 {
				t.Errorf("reports %v, and it sends %+v", reports, m)
			}
		case *proto.Report:
			if !reports || m.Lease != 7 || m.Sequence != 1 {
				t.Errorf("reports %v, and it sends %+v", reports, m)
			}
		default:
			t.Errorf("reports %v, and it sends %T", reports, m)
		}
	}
}
