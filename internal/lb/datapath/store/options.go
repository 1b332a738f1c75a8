package store

import (
	"log/slog"

	"github.com/vishvananda/netlink"

	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/abi"
	"github.com/shunt-lb/shunt/internal/lb/model"
)

// Options identify a data plane.
type Options struct {
	Instance string       // names its directory, so that several can live on one host
	Limits   model.Limits // size the maps; unused by OpenReadOnly
	PinRoot  string       // a bpffs; kernel.DefaultPinRoot if empty
	Log      *slog.Logger // slog.Default() if nil
	Version  *abi.Version // other than this process's; for tests
	// VLANs describes an interface as a VLAN of its parent, if it is one; nil: netlink is asked. For tests.
	VLANs func(netlink.Link) (VLAN, bool)
}

// Complete fills in defaults, except for VLANs, and refuses a name that cannot be an instance's.
func (o *Options) Complete() error {
	if o.PinRoot == "" {
		o.PinRoot = kernel.DefaultPinRoot
		_, _ = kernel.SharePins() // reading needs it as well; Open reports the fault
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.Version == nil {
		o.Version = abi.Built()
	}
	return kernel.CheckName(o.Instance)
}
