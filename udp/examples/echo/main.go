// Echo answers each datagram of a lease with itself, from AF_XDP and, for datagrams that AF_XDP does not
// get, from the kernel's socket on the same port:
//
//	echo --socket /run/shunt/udp.sock --name echo --listen :5000
//
// It needs no right but the offer's. It goes on without a lease: on the kernel's socket.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"time"

	"github.com/shunt-lb/shunt/udp"
)

func main() {
	socket := flag.String("socket", udp.DefaultSocket, "of shunt's broker")
	name := flag.String("name", "echo", "of the offer")
	listen := flag.String("listen", ":5000", "where the kernel's socket listens")
	flag.Parse()
	conn, err := net.ListenPacket("udp", *listen)
	if err != nil {
		log.Fatal(err)
	}
	go kernel(conn)
	for {
		err := lease(*socket, *name)
		log.Printf("the kernel's socket answers: %v", err)
		var ended *udp.Ended
		if errors.As(err, &ended) && (ended.Code == "protocol" || ended.Code == "tampered") {
			log.Fatal("this program has a fault")
		}
		time.Sleep(time.Second)
	}
}

// kernel answers the datagrams that AF_XDP does not get: fragments, options, and everything while there is
// no lease.
func kernel(conn net.PacketConn) {
	buffer := make([]byte, 64<<10)
	for {
		n, from, err := conn.ReadFrom(buffer)
		if err != nil {
			log.Fatal(err)
		}
		if _, err := conn.WriteTo(buffer[:n], from); err != nil {
			log.Print(err)
		}
	}
}

// lease answers until the lease is over, and returns the reason.
func lease(socket, name string) error {
	l, err := udp.Open(context.Background(), udp.Options{Socket: socket, Name: name, Spin: 50 * time.Microsecond})
	if err != nil {
		return err
	}
	defer l.Close() //nolint:errcheck // it is over
	fmt.Printf("answering %v in %s mode\n", l.Addresses, l.Mode)
	if err := l.Queues[0].Pin(); err != nil { // one goroutine has all queues, so the first one's CPU is theirs
		log.Print(err)
	}
	batch := make([]udp.Descriptor, 64)
	for l.Err() == nil {
		if _, err := l.Wait(time.Second); err != nil {
			return err
		}
		for _, q := range l.Queues {
			n := q.Receive(batch)
			ready := 0
			for i := range batch[:n] {
				if q.Reply(&batch[i]) != nil { // not plain UDP, or the lease cannot send
					q.Release(batch[i : i+1])
					continue
				}
				batch[ready] = batch[i]
				ready++
			}
			sent := q.Send(batch[:ready])
			q.Release(batch[sent:ready])
			if err := errors.Join(q.Flush(), q.Err()); err != nil {
				return err
			}
		}
	}
	return l.Err()
}
