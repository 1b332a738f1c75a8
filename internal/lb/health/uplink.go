package health

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// linkSettles is the time after its return for which a link counts as down for probes that began then: the
	// first SYN may be lost, and is sent again after a second (RFC 6298, 2.1).
	linkSettles = time.Second
	// linksAgain is the time after which following the links is tried again.
	linksAgain = time.Second
)

// Uplinks knows whether this machine's own network to a backend works: whether there is a route, and whether
// the route's interface has been up. It needs rtnetlink, and no privilege.
type Uplinks struct {
	log     *slog.Logger
	handle  *netlink.Handle
	cancel  context.CancelFunc
	running sync.WaitGroup

	mu    sync.Mutex
	links map[int]uplink
}

type uplink struct {
	name  string
	works bool
	broke time.Time // when it was last seen not to work; zero: never
}

// NewUplinks follows the interfaces of the calling thread's network namespace until it is closed.
func NewUplinks(log *slog.Logger) (*Uplinks, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open a netlink socket to look routes up: %w", err)
	}
	u := &Uplinks{log: log, handle: handle, links: map[int]uplink{}}
	ctx, cancel := context.WithCancel(context.Background())
	u.cancel = cancel
	updates, err := subscribe(ctx)
	if err != nil {
		cancel()
		handle.Close()
		return nil, err
	}
	u.running.Go(func() { u.follow(ctx, updates) })
	return u, nil
}

// Close ends it.
func (u *Uplinks) Close() {
	u.cancel()
	u.running.Wait()
	u.handle.Close()
}

func subscribe(ctx context.Context) (chan netlink.LinkUpdate, error) {
	updates := make(chan netlink.LinkUpdate, 64)
	err := netlink.LinkSubscribeWithOptions(updates, ctx.Done(), netlink.LinkSubscribeOptions{ListExisting: true, ErrorCallback: func(error) {}})
	if err != nil {
		return nil, fmt.Errorf("subscribe to interface changes: %w", err)
	}
	return updates, nil
}

// follow records the states of the links. If notifications are lost the subscription ends, and another one
// begins with all links.
func (u *Uplinks) follow(ctx context.Context, updates chan netlink.LinkUpdate) {
	for ctx.Err() == nil {
		for update := range updates {
			u.note(int(update.Index), update.Attrs().Name, update.Header.Type != unix.RTM_DELLINK && linkWorks(update.Flags), time.Now())
		}
		for ctx.Err() == nil {
			var err error
			if updates, err = subscribe(ctx); err == nil {
				break
			}
			u.log.Error("cannot follow interfaces for health checks; trying again", "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(linksAgain):
			}
		}
	}
}

func linkWorks(flags uint32) bool {
	return flags&(unix.IFF_UP|unix.IFF_RUNNING) == unix.IFF_UP|unix.IFF_RUNNING
}

func (u *Uplinks) note(index int, name string, works bool, now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	before, known := u.links[index]
	link := uplink{name: name, works: works, broke: before.broke}
	if !works || known && !before.works {
		link.broke = now
	}
	u.links[index] = link
}

// towards returns the interface through which packets to an address leave.
func (u *Uplinks) towards(to netip.Addr) (index int, err error) {
	routes, err := u.handle.RouteGet(to.AsSlice())
	if err != nil {
		return 0, err
	}
	if len(routes) == 0 {
		return 0, unix.ENETUNREACH
	}
	return routes[0].LinkIndex, nil
}

// broken returns the reason why a probe of an address since then says nothing about its backend: this machine's
// own network to it did not work. usual is the interface of the last successful probe, or 0. Empty: the network
// worked.
func (u *Uplinks) broken(to netip.Addr, usual int, since time.Time) (why string) {
	index, err := u.towards(to)
	if err != nil {
		return fmt.Sprintf("no route leads to %s (%v)", to, err)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, i := range []int{index, usual} {
		link, known := u.links[i]
		switch {
		case !known:
		case !link.works:
			return "interface " + link.name + " is down or has no carrier"
		case !link.broke.IsZero() && since.Before(link.broke.Add(linkSettles)):
			return "interface " + link.name + " was down"
		}
	}
	return ""
}

// works reports whether an interface is not known to be down.
func (u *Uplinks) works(index int) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	link, known := u.links[index]
	return !known || link.works
}

// ownNetworkDown is the failure of a probe that was lost on this machine.
type ownNetworkDown struct{ why string }

func (e ownNetworkDown) Error() string {
	return "not judged: this machine's own network is down: " + e.why
}

// NotMade makes isHere recognise the error.
func (ownNetworkDown) NotMade() bool { return true }

// judge returns a probe's result, or ownNetworkDown instead of a failure that says nothing about the backend.
func (u *Uplinks) judge(c *check, t target, err error, started time.Time) error {
	if u == nil || isHere(err) {
		return err
	}
	to := t.at.Addr()
	if t.direct != "" {
		to = t.backend.Address
	}
	usual := int(c.usual.Load())
	if err == nil {
		if usual == 0 || !u.works(usual) {
			if index, err := u.towards(to); err == nil {
				c.usual.Store(int32(index))
			}
		}
		return nil
	}
	if why := u.broken(to, usual, started); why != "" {
		return ownNetworkDown{why}
	}
	if errors.Is(err, unix.ENETDOWN) {
		return ownNetworkDown{err.Error()}
	}
	return err
}
