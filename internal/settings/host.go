package settings

import (
	"errors"
	"net"
	"net/netip"
	"os/user"
	"strconv"
)

// LocalHost is this machine, or the network namespace of this process.
var LocalHost = Host{HasGroup: hasGroup, CanListen: canListen}

// canListen has the kernel give an address to a socket, at a port of its choice.
func canListen(addr netip.Addr) error {
	socket, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(addr, 0)))
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			return op.Err
		}
		return err
	}
	return socket.Close()
}

// hasGroup reports whether this machine has a group of users, by name or number.
func hasGroup(name string) bool {
	if _, err := strconv.ParseUint(name, 10, 31); err == nil {
		return true // a number needs no name
	}
	_, err := user.LookupGroup(name)
	return err == nil
}
