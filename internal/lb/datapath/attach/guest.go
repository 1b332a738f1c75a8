package attach

import (
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/shunt-lb/shunt/internal/kernel"
)

// meetGuest adds another product's program to a chain, if shunt's program passes packets to one. It needs
// CAP_SYS_ADMIN.
func (c *Chain) meetGuest() error {
	if c.Shunt == nil {
		return nil
	}
	own, err := ebpf.NewProgramFromID(ebpf.ProgramID(c.Shunt.ID))
	if err != nil {
		return fmt.Errorf("open program %d of interface %s: %w", c.Shunt.ID, c.Interface, err)
	}
	defer own.Close()
	guest, err := kernel.GuestOf(own)
	if err != nil || guest == nil {
		return err
	}
	defer guest.Close()
	c.Guest, err = describe(guest)
	return err
}
