package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/google/nftables"

	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/lb/daemon"
	"github.com/shunt-lb/shunt/kube/hold"
)

// TestHolder: the table outlives an agent that keeps the data plane, and no other agent; a start without --moving
// removes it.
func TestHolder(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root: run the tests with sudo")
	}
	l, err := lab.New(fmt.Sprintf("hc%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	node, err := l.AddHost("node")
	if err != nil {
		t.Fatal(err)
	}
	broken := errors.New("the file has a fault")
	follow := func(context.Context, func(daemon.Change) error) {}
	for _, step := range []struct {
		name       string
		on, begins bool
		detaches   bool
		err        error
		held       bool
	}{
		{name: "it does not start", on: true, err: broken},
		{name: "it ends and keeps", on: true, begins: true, held: true},
		{name: "the next one does not start", on: true, err: broken, held: true},
		{name: "one without the flag does not start", err: broken, held: true},
		{name: "the next one keeps", on: true, begins: true, held: true},
		{name: "one without the flag begins", begins: true},
		{name: "one with the flag detaches", on: true, begins: true, detaches: true},
	} {
		if err := node.Run(func() error {
			h := holder{on: step.on, log: slog.New(slog.DiscardHandler)}
			h.take()
			if step.begins {
				h.beside(follow)(t.Context(), nil)
			}
			if step.detaches {
				if err := h.release(); err != nil {
					return err
				}
			}
			if err := h.over(step.err); !errors.Is(err, step.err) {
				return fmt.Errorf("it ends with %w", err)
			}
			return isHeld(step.held)
		}); err != nil {
			t.Errorf("%s: %v", step.name, err)
		}
	}

	if err := node.Run(func() error { return warns(t) }); err != nil {
		t.Error(err)
	}
}

// isHeld is an error unless the table is there, or is not.
func isHeld(want bool) error {
	conn, err := nftables.New()
	if err != nil {
		return err
	}
	tables, err := conn.ListTables()
	if err == nil && (len(tables) > 0) != want {
		err = fmt.Errorf("there are %d tables", len(tables))
	}
	return err
}

// warns has the table refused, by a chain that cannot become the needed one.
func warns(t *testing.T) error {
	t.Helper()
	conn, err := nftables.New()
	if err != nil {
		return err
	}
	foreign := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: hold.Table})
	conn.AddChain(&nftables.Chain{Table: foreign, Name: "nat", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter})
	if err := conn.Flush(); err != nil {
		return err
	}
	var out bytes.Buffer
	h := holder{on: true, log: slog.New(slog.NewTextHandler(&out, nil))}
	h.take()
	for _, word := range []string{"level=WARN", "connections that kube-proxy balanced are lost when its rules are removed", "leave kube-proxy's rules", hold.Table} {
		if !strings.Contains(out.String(), word) {
			t.Errorf("no %q in\n%s", word, out.String())
		}
	}
	return nil
}
