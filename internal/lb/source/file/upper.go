package file

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/shunt-lb/shunt/internal/config"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Upper is a macvlan that takes frames which arrive on an interface of the configuration: the programs there
// see another hardware address than the interface's, and pass the frames on.
type Upper struct {
	Name, Below string
	Text        string // the effect
	Remedy      string // the remedy
	Severe      bool   // it takes frames of services: their VIP is on it, or it has the address of a virtual router
}

// vrrp are the hardware addresses of virtual routers (RFC 9568, 7.3), without the last octet, for IPv4 and IPv6.
var vrrp = [][]byte{{0, 0, 0x5e, 0, 1}, {0, 0, 0x5e, 0, 2}}

func isVRRP(mac net.HardwareAddr) bool {
	return slices.ContainsFunc(vrrp, func(prefix []byte) bool { return bytes.HasPrefix(mac, prefix) })
}

// Uppers finds macvlans that keep frames from services. With attach: tc for both, the interface and the
// macvlan above it, they are balanced.
func Uppers(listed []model.Interface, isVIP func(netip.Addr) bool, host []HostInterface) (found []Upper) {
	attach := map[string]model.Attach{}
	for _, l := range listed {
		attach[l.Name] = l.Attach
	}
	for _, own := range host {
		_, listed := attach[own.Name]
		_, below := attach[own.Below]
		if own.Below == "" || !listed && !below || attach[own.Name] == model.AttachTC && attach[own.Below] == model.AttachTC {
			continue
		}
		u := Upper{Name: own.Name, Below: own.Below, Severe: listed || isVRRP(own.MAC)}
		what := "traffic to it is not balanced"
		for _, p := range own.Prefixes {
			if isVIP(p.Addr()) {
				u.Severe = true
				what = fmt.Sprintf("packets to %s, which it has, are not balanced", p.Addr())
				break
			}
		}
		if listed {
			what = "they are balanced only at tc"
		}
		u.Text = fmt.Sprintf("%s is a macvlan above %s and takes frames to its own hardware address, %s: %s", own.Name, own.Below, own.MAC, what)
		u.Remedy = fmt.Sprintf("list both, %s and %s, under interfaces with `attach: tc`", own.Below, own.Name)
		if isVRRP(own.MAC) {
			u.Remedy += ", or have VRRP use the address of " + own.Below + " (in keepalived without use_vmac)"
		}
		found = append(found, u)
	}
	return found
}

// uppers checks for macvlans above interfaces of the file. A macvlan that takes no frames of services is a
// warning only with strict.
func (h *hostCheck) uppers(strict bool) {
	vips := h.vips()
	for _, u := range Uppers(h.Config.Interfaces, func(a netip.Addr) bool { return vips[a] }, h.own) {
		severity := h.severity
		if !u.Severe {
			severity = config.SeverityWarning
		}
		i := slices.IndexFunc(h.Config.Interfaces, func(l model.Interface) bool { return l.Name == u.Name })
		if i < 0 {
			i = slices.IndexFunc(h.Config.Interfaces, func(l model.Interface) bool { return l.Name == u.Below })
		}
		if u.Severe || strict {
			h.faults.Add(severity, h.Parsed.interfaces[i], u.Text, u.Remedy)
		}
	}
}
