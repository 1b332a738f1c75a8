// Pcap writes the datagrams of a lease into a file that tcpdump and Wireshark read, until it has enough of
// them. It only receives, so the offer need not allow sending:
//
//	pcap --socket /run/shunt/udp.sock --name feed --count 1000 --write feed.pcap
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
	"github.com/shunt-lb/shunt/udp"
)

func main() {
	socket := flag.String("socket", udp.DefaultSocket, "of shunt's broker")
	name := flag.String("name", "feed", "of the offer")
	count := flag.Int("count", 1000, "datagrams to write")
	path := flag.String("write", "feed.pcap", "file")
	flag.Parse()
	if err := record(*socket, *name, *path, *count); err != nil {
		log.Fatal(err)
	}
}

func record(socket, name, path string, count int) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	writer := pcapgo.NewWriter(file)
	if err := writer.WriteFileHeader(64<<10, layers.LinkTypeEthernet); err != nil {
		return err
	}
	l, err := udp.Open(context.Background(), udp.Options{Socket: socket, Name: name})
	if err != nil {
		return err
	}
	defer l.Close() //nolint:errcheck // all wanted packets are written
	fmt.Printf("receiving from %v in %s mode\n", l.Addresses, l.Mode)
	if err := l.Queues[0].Pin(); err != nil { // one goroutine has all queues, so the first one's CPU is theirs
		log.Print(err)
	}
	batch := make([]udp.Descriptor, 64)
	for written := 0; written < count; {
		if err := l.Err(); err != nil {
			return err
		}
		if _, err := l.Wait(time.Second); err != nil {
			return err
		}
		now := time.Now() // of the batch: the kernel gives no time with a packet
		for _, q := range l.Queues {
			n := q.Receive(batch)
			for i := range batch[:min(n, count-written)] {
				frame := q.Bytes(&batch[i])
				if err := writer.WritePacket(gopacket.CaptureInfo{Timestamp: now, CaptureLength: len(frame), Length: len(frame)}, frame); err != nil {
					return err
				}
				written++
			}
			q.Release(batch[:n])
			if err := q.Err(); err != nil {
				return err
			}
		}
	}
	return file.Close()
}
