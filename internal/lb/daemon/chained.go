package daemon

import (
	"log/slog"

	shuntv1 "github.com/shunt-lb/shunt/api/v1"
	"github.com/shunt-lb/shunt/internal/kernel"
	"github.com/shunt-lb/shunt/internal/lb/datapath/attach"
)

// showChains adds to a status the programs of each interface on which other programs run beside shunt's, in a
// packet's order: programs that operators have set (`shunt chain`), and programs of other products.
func showChains(attached []*shuntv1.Attachment, read func(iface string) (attach.Chain, error), log *slog.Logger) {
	for _, a := range attached {
		if kernel.Mode(a.Mode).AtTC() {
			continue
		}
		chain, err := read(a.Interface)
		if err != nil {
			log.Warn("cannot show the programs on an interface; `shunt chain list` reads them as root", "interface", a.Interface, "error", err)
			continue
		}
		a.Chain = chainMessages(chain)
	}
}

// chainMessages returns nil if shunt's program is alone.
func chainMessages(chain attach.Chain) (all []*shuntv1.ChainedProgram) {
	for _, entry := range chain.Entries() {
		if p := entry.Program; p != nil {
			all = append(all, &shuntv1.ChainedProgram{Position: string(entry.Position), Name: p.Name, Id: p.ID})
		}
	}
	if len(all) < 2 {
		return nil
	}
	return all
}
