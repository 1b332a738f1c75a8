package demo

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
)

// made remembers flows by backend, until they are compared with the data plane's counters.
func (c *Counted) made(d *demo, to target, on map[string]int) {
	for _, host := range d.top.Backends {
		key := to.backendKey(host)
		i := slices.IndexFunc(c.Backends, func(b CountedBackend) bool { return b.Service == to.service && b.Backend == key })
		if i < 0 {
			i = len(c.Backends)
			c.Backends = append(c.Backends, CountedBackend{Service: to.service, Backend: key, Name: host.Name()})
		}
		c.Backends[i].Made += on[host.Name()]
	}
}

// moved remembers a flow that may be counted twice: one that moved, or failed.
func (c *Counted) moved(service string) {
	i := slices.IndexFunc(c.Services, func(s CountedService) bool { return s.Service == service })
	if i < 0 {
		i = len(c.Services)
		c.Services = append(c.Services, CountedService{Service: service})
	}
	c.Services[i].Moved++
}

// countExactly compares, backend by backend, flows that clients made with flows that the
// data plane counted. Nothing has disturbed them yet, so they are equal.
func (d *demo) countExactly(ctx context.Context) error {
	now, err := d.status(ctx)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(d.Out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "  SERVICE\tBACKEND\tNAME\tANSWERED\tFLOWS\tPACKETS IN\tBYTES IN\tPACKETS OUT\tBYTES OUT")
	var wrong []string
	for i := range d.facts.Counted.Backends {
		b := &d.facts.Counted.Backends[i]
		b.Traffic = now.service(b.Service).backend(b.Backend).Traffic
		fmt.Fprintf(w, "  %s\t%s\t%s\t%d\t%s\n", b.Service, b.Backend, b.Name, b.Made, b.columns())
		if uint64(b.Made) != b.FlowsCreated {
			wrong = append(wrong, fmt.Sprintf("%s answered %d flows and %d were counted", b.Backend, b.Made, b.FlowsCreated))
		}
	}
	_ = w.Flush()
	d.Say("\n")
	d.Claim(len(wrong) == 0, "for every backend the data plane counted exactly the flows that it answered%s", but(wrong))
	return nil
}

// countAll compares the services' totals, and shows the reasons.
func (d *demo) countAll(ctx context.Context) error {
	d.endFlows()
	now, err := d.status(ctx)
	if err != nil {
		return err
	}
	c := &d.facts.Counted
	c.Reasons = now.Reasons
	w := tabwriter.NewWriter(d.Out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "  SERVICE\tBACKEND\tMADE\tFLOWS\tPACKETS IN\tBYTES IN\tPACKETS OUT\tBYTES OUT")
	for _, service := range now.Services {
		i := slices.IndexFunc(c.Services, func(s CountedService) bool { return s.Service == service.Name })
		if i < 0 {
			i = len(c.Services)
			c.Services = append(c.Services, CountedService{Service: service.Name})
		}
		c.Services[i].Made, c.Services[i].Traffic = d.made[service.Name], service.Traffic
		fmt.Fprintf(w, "  %s\t\t%d\t%s\n", service.Name, d.made[service.Name], service.columns())
		for _, b := range service.Backends {
			fmt.Fprintf(w, "  \t%s\t\t%s\n", b.Address, b.columns())
		}
	}
	_ = w.Flush()
	d.showReasons(now.Reasons)
	for _, s := range c.Services {
		made, counted := uint64(s.Made), s.FlowsCreated
		d.Claim(made <= counted && counted <= made+uint64(s.Moved), "service %s: %d flows made, %d counted; %d that moved or failed may be counted twice",
			s.Service, made, counted, s.Moved)
	}
	lost := now.Reasons["redirect_refused"].Packets + now.Reasons["tx_refused"].Packets
	d.Claim(lost == 0, "the kernel refused none of the frames that were sent")
	return nil
}

func (d *demo) showReasons(reasons map[string]Count) {
	d.Say("\n  Packets that were not simply forwarded, or are worth a note, by reason:\n\n")
	w := tabwriter.NewWriter(d.Out, 0, 0, 3, ' ', 0)
	names := slices.SortedFunc(maps.Keys(reasons), func(a, b string) int {
		return cmp.Or(cmp.Compare(reasons[b].Packets, reasons[a].Packets), strings.Compare(a, b))
	})
	for _, name := range names {
		fmt.Fprintf(w, "  %s\t%d packets\n", name, reasons[name].Packets)
	}
	_ = w.Flush()
	d.Say("\n")
}

func (t Traffic) columns() string {
	return fmt.Sprintf("%d\t%d\t%d\t%d\t%d", t.FlowsCreated, t.PacketsIn, t.BytesIn, t.PacketsOut, t.BytesOut)
}
