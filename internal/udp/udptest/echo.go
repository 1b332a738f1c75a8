package udptest

import (
	"errors"
	"time"

	"github.com/shunt-lb/shunt/udp"
)

// Echo answers until the lease is over, and works on each datagram for a time. The answer is the datagram with its
// first byte replaced by "x".
func Echo(l *udp.Lease, each time.Duration) error {
	batch := make([]udp.Descriptor, 16)
	for l.Err() == nil {
		if _, err := l.Wait(20 * time.Millisecond); err != nil {
			return err
		}
		for _, q := range l.Queues {
			n := q.Receive(batch)
			for i := range batch[:n] {
				p, err := q.Packet(&batch[i])
				if err != nil {
					return err
				}
				for begin := time.Now(); time.Since(begin) < each; { //nolint:revive // this is the work
				}
				p.Payload[0] = 'x'
				if err := q.Reply(&batch[i]); err != nil {
					return err
				}
			}
			sent := q.Send(batch[:n])
			q.Release(batch[sent:n])
			if err := errors.Join(q.Flush(), q.Err()); err != nil {
				return err
			}
		}
	}
	return l.Err()
}
