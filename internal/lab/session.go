package lab

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"
)

// Session is one flow of a client's: a TCP connection on which requests follow each other,
// or a UDP socket. It is no http.Client: that would quietly open another connection where the
// first broke, and on a busy machine also where it did not (net/http waits 50 ms for its own
// writer before it gives a connection up).
type Session struct {
	net.Conn
	udp    bool
	reader *bufio.Reader
}

// OpenSession connects from the host to a lab's server at a literal address; local is as in
// DialFrom. The caller closes the session.
func (h *Host) OpenSession(ctx context.Context, network string, local netip.AddrPort, address string) (*Session, error) {
	conn, err := h.DialFrom(ctx, network, local, address)
	if err != nil {
		return nil, err
	}
	session := NewSession(conn)
	session.udp = strings.HasPrefix(network, "udp")
	return session, nil
}

// NewSession is a session on an existing TCP connection.
func NewSession(conn net.Conn) *Session { return &Session{Conn: conn, reader: bufio.NewReader(conn)} }

// Ask asks the server for its name. A datagram is sent once: a lost one is an error when ctx ends.
// path, "/" or more, comes back in the answer, and for a datagram it must.
func (s *Session) Ask(ctx context.Context, path string) (Answer, error) {
	_ = s.SetDeadline(time.Time{}) // that of an earlier question that was given up
	if s.udp {
		answer, err := AskUDPOn(ctx, s.Conn, []byte(path))
		answer.Path = path
		return answer, err
	}
	stop := context.AfterFunc(ctx, func() { _ = s.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	answer, err := s.askHTTP(path)
	if err != nil && ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		return answer, fmt.Errorf("ask %s from %s over tcp: %w", s.RemoteAddr(), s.LocalAddr(), err)
	}
	return answer, nil
}

func (s *Session) askHTTP(path string) (answer Answer, err error) {
	if _, err := fmt.Fprintf(s, "GET %s HTTP/1.1\r\nHost: shunt.example\r\n\r\n", path); err != nil {
		return answer, err
	}
	response, err := http.ReadResponse(s.reader, nil)
	if err != nil {
		return answer, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return answer, fmt.Errorf("the server answered %s", response.Status)
	}
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return answer, err
	}
	return answer, json.Unmarshal(text, &answer)
}
