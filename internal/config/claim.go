package config

import (
	"iter"

	"github.com/shunt-lb/shunt/internal/value"
)

// Claim is something that only one part of a file can have: packets to an address and port, or an interface.
// Parts do not know each other, so each declares its claims, and claims that two of them share are a fault.
type Claim struct {
	Of    string          // the same words in every part: "interface eth0", "udp 192.0.2.10"
	Ports value.PortRange // claims of the same overlap where their ports do; the zero value where there are none
	Text  string          // in messages: "192.0.2.10:53 (udp)"
	As    string          // who has it, in messages: "a frontend of service \"dns\""
	Mark  Mark
	// Why and Instead are for the message, if an earlier part has the same claim: the effect, and the remedy.
	Why, Instead string
}

// claimed is a claim of a part.
type claimed struct {
	part *Part
	all  iter.Seq[Claim]
}

// Claims records the claims of the part that is being built. They are listed only if another part of the file
// has claims, too: a balancer can have hundreds of thousands.
func (c *Contents) Claims(all iter.Seq[Claim]) {
	c.claims = append(c.claims, claimed{c.building, all})
}

// compareClaims adds a fault for each claim that a part shares with an earlier one.
func (c *Contents) compareClaims() {
	for i, later := range c.claims {
		wanted := map[string][]Claim{}
		if i > 0 {
			for claim := range later.all {
				wanted[claim.Of] = append(wanted[claim.Of], claim)
			}
		}
		for _, earlier := range c.claims[:i] {
			if earlier.part == later.part {
				continue
			}
			for theirs := range earlier.all {
				for _, mine := range wanted[theirs.Of] {
					if mine.Ports.First <= theirs.Ports.Last && theirs.Ports.First <= mine.Ports.Last {
						c.Faults.Errorf(mine.Mark, mine.Instead, "%s is also %s, at %s: %s", mine.Text, theirs.As, theirs.Mark.At, mine.Why)
					}
				}
			}
		}
	}
	c.claims = nil
}
