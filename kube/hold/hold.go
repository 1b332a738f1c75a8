// Package hold keeps the kernel's connection tracking and address translation on in a network namespace.
//
// The kernel has hooks for the two only while they are needed: hooks for translation while there is a chain of type nat
// (nf_nat_register_fn in net/netfilter/nf_nat_core.c), hooks for tracking while there is a rule that reads its state
// (nf_ct_netns_get in net/netfilter/nf_conntrack_proto.c). When kube-proxy's rules are the last ones, their removal removes the
// hooks, and the next packet of a connection that they have translated is not translated any more. The connection is
// lost, although the kernel still has its entry. A table of shunt's own keeps both hooks:
//
//	table inet shunt-moving {
//		chain nat { type nat hook prerouting priority dstnat; policy accept; }
//		chain track { ct state established }
//	}
//
// It changes no packet: the first chain has no rule, and nothing leads to the second one, so its rule costs
// no packet anything and needs no verdict. The table belongs to no process, so it outlives an agent that is restarted.
package hold

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/shunt-lb/shunt/internal/lb/moving"
)

// Table is the table's name, in the family inet.
const Table = moving.Table

func table() *nftables.Table {
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: Table}
}

// Take makes the table in the network namespace of the calling thread, in one transaction, and reports whether it is
// new. It completes an existing table. It needs CAP_NET_ADMIN, and a kernel with nf_tables and its chains of type nat
// for inet (Linux 5.2). After an error nothing has changed.
func Take() (made bool, err error) {
	conn, err := nftables.New()
	if err != nil {
		return false, takeError(err)
	}
	there, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return false, takeError(err)
	}
	t := conn.AddTable(table())
	conn.AddChain(&nftables.Chain{Table: t, Name: "nat", Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest})
	track := conn.AddChain(&nftables.Chain{Table: t, Name: "track"})
	conn.FlushChain(track) // the kernel removes the old rule after it has the new one, so the hooks stay
	established := binary.NativeEndian.AppendUint32(nil, expr.CtStateBitESTABLISHED)
	none := make([]byte, len(established))
	conn.AddRule(&nftables.Rule{Table: t, Chain: track, Exprs: []expr.Any{
		&expr.Ct{Register: 1, Key: expr.CtKeySTATE},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: uint32(len(established)), Mask: established, Xor: none},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: none},
	}})
	if err := conn.Flush(); err != nil {
		return false, takeError(err)
	}
	return !slices.ContainsFunc(there, func(t *nftables.Table) bool { return t.Name == Table }), nil
}

func takeError(err error) error {
	return fmt.Errorf("make the nftables table inet %s: %w", Table, err)
}

// Release removes the table from the network namespace of the calling thread, and reports whether there was one. It needs
// CAP_NET_ADMIN. A kernel without nf_tables has none.
func Release() (was bool, err error) { return moving.Remove() }
