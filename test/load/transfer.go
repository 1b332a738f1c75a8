package load

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// transfers moves one body after another, in turns from and to the service. The lab's servers
// and clients compare the SHA-256 sums of the sent and the received body.
func (l *Load) transfers(ctx context.Context, i int, begun func()) {
	defer begun()
	for n := i / len(l.options.Targets); ctx.Err() == nil; n++ {
		to := l.target(i)
		w := &watched{load: l, ctx: ctx, begun: begun}
		w.flow = flow{kind: Download, service: to.Service, address: to.TCP, begun: time.Now()}
		move := lab.Download
		if n%2 == 1 {
			w.flow.kind, move = Upload, lab.Upload
		}
		client := &http.Client{Transport: &http.Transport{DialContext: w.dial, DisableKeepAlives: true, DisableCompression: true}}
		_, err := move(ctx, client, to.TCP.String(), l.options.TransferSize)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			l.fail(w.flow, "broken", err)
			pause(ctx, time.Now().Add(l.options.KeepAliveEvery))
			continue
		}
		l.count(w.flow.kind, l.options.TransferSize)
	}
}

// watched is the connection of a transfer: it keeps to a rate, notes stalls, and knows its
// backend.
type watched struct {
	net.Conn
	load  *Load
	ctx   context.Context
	begun func()
	flow  flow
	// pace is the begin of the transfer if it had always kept to its rate.
	pace  time.Time
	moved int64        // bytes, in the direction of the body
	wrote atomic.Int64 // when a write last returned, in Unix nanoseconds
}

// transferBuffer bounds the contents of a socket: in a longer queue a stall would not be seen,
// and a longer burst overflows the ring of a veth (256 frames, VETH_RING_SIZE in
// drivers/net/veth.c).
const transferBuffer = 128 << 10

// dial connects, and asks for the backend's name before the transfer begins.
func (w *watched) dial(ctx context.Context, network, address string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, giveUp)
	defer cancel()
	since := time.Now()
	session, err := w.load.options.Client.OpenSession(ctx, network, netip.AddrPort{}, address)
	if err != nil {
		return nil, err
	}
	if err = w.load.ask(ctx, session, &w.flow, 0); err == nil {
		tcp := session.Conn.(*net.TCPConn)
		err = errors.Join(tcp.SetDeadline(time.Time{}), tcp.SetReadBuffer(transferBuffer), tcp.SetWriteBuffer(transferBuffer))
	}
	if err != nil {
		_ = session.Close()
		return nil, err
	}
	w.waited(since)
	w.Conn, w.pace = session.Conn, time.Now()
	w.begun()
	return w, nil
}

// Read reads the body of a download, or the answer to an upload.
func (w *watched) Read(b []byte) (int, error) {
	down := w.flow.kind == Download
	if down {
		w.keepPace()
		if err := w.SetReadDeadline(time.Now().Add(giveUp)); err != nil {
			return 0, err
		}
	}
	since := time.Now()
	n, err := w.Conn.Read(b)
	if wrote := time.Unix(0, w.wrote.Load()); wrote.After(since) {
		since = wrote
	}
	if n > 0 || down {
		w.waited(since)
	}
	if down {
		w.moved += int64(n)
	}
	return n, err
}

// Write writes the body of an upload, or the question for a download.
func (w *watched) Write(b []byte) (int, error) {
	up := w.flow.kind == Upload
	if up {
		w.keepPace()
	}
	since := time.Now()
	if err := w.SetWriteDeadline(since.Add(giveUp)); err != nil {
		return 0, err
	}
	n, err := w.Conn.Write(b)
	w.waited(since)
	w.wrote.Store(time.Now().UnixNano())
	if up {
		w.moved += int64(n)
		_ = w.SetReadDeadline(time.Now().Add(2 * giveUp)) // of the answer
	}
	return n, err
}

func (w *watched) waited(since time.Time) {
	if w.ctx.Err() == nil {
		w.load.waited(w.flow, since)
	}
}

// keepPace waits until more may be moved. Lost time is not made up for, which would be a
// burst.
func (w *watched) keepPace() {
	const slack = 100 * time.Millisecond
	due := w.pace.Add(time.Duration(float64(w.moved) / float64(w.load.options.TransferRate) * float64(time.Second)))
	if behind := time.Since(due); behind > slack {
		w.pace = w.pace.Add(behind - slack)
	}
	pause(w.ctx, due)
}
