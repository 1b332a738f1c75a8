// Package demo shows a working balancer to a user who has nothing but the binary: it
// builds a network out of namespaces, starts the same `shunt run` that a user starts, with a file
// that a user could have written, sends real HTTP and UDP through it, and checks its claims.
//
//	client ─── lb (shunt run, a child process) ─── switch ─┬─ b1   (shunt demo backend,
//	                                                       ├─ b2    child processes)
//	                                                       └─ b3
//
// Every line that claims something is a Claim, measured in this run. The claims, and the
// figures behind them, are the Facts: text for a reader and JSON for a program are two
// views of the same values.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/shunt-lb/shunt/internal/control"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/internal/record"
	"github.com/shunt-lb/shunt/internal/story"
)

// Options say how the demo runs.
type Options struct {
	Executable string    // the shunt binary that plays balancer and backends
	Command    string    // how the reader would call it, for the commands to try next
	Keep       bool      // leave lab and balancer standing at the end
	Out        io.Writer // the story
}

const titleStop = "SIGTERM"

// patience limits every wait for something that takes milliseconds.
const patience = 5 * time.Second

// demo is one run.
type demo struct {
	*story.Teller
	opts   Options
	facts  *Facts
	began  time.Time
	top    *lab.Topology
	folder string // configuration, control socket and log
	daemon *process
	kids   []*process // of the backends, in their order
	made   map[string]int
	flows  *load
	// udpFlows is the number of source ports that were used for them.
	udpFlows int
}

// Run runs the whole demo. It cleans up before it returns, unless Keep is set and the demo reached its end. A
// failed step or an untrue claim is a claim that makes Facts.OK false. The error is ctx's, if ctx ended, and
// that of a cleaning up that failed.
func Run(parent context.Context, opts Options) (*Facts, error) {
	d := &demo{Teller: story.NewTeller(opts.Out), opts: opts, facts: newFacts(), began: time.Now(), made: map[string]int{}}
	ctx, cancel := context.WithTimeoutCause(parent, time.Minute, errors.New("the demo took longer than a minute"))
	defer cancel()
	fault := d.story(ctx)
	interrupted := parent.Err()
	if fault != nil && interrupted == nil {
		d.Claim(false, "%v", fault)
		d.showLog()
	}
	var err error
	if fault == nil && opts.Keep {
		d.endFlows()
		d.sayHowToLookAround()
	} else {
		err = errors.Join(interrupted, d.takeDown(fault == nil))
	}
	d.facts.Seconds = time.Since(d.began).Seconds()
	d.facts.Claims = d.Claims
	d.facts.OK = err == nil && d.Claims.Untrue() == 0
	return d.facts, err
}

// story runs the steps in the order in which a reader sees them.
func (d *demo) story(ctx context.Context) error {
	for _, step := range []struct {
		title string
		do    func(context.Context) error
	}{
		{"The network", d.build},
		{"The configuration", d.configure},
		{"shunt run", d.start},
		{"Which backend answers", d.spread},
		{"One packet's path", d.path},
		{"The counters so far", d.countExactly},
		{"The servers of a backend are killed (SIGKILL) while requests flow", d.crash},
		{"A backend is taken out of the file while requests flow", d.removeBackend},
		{"The daemon is killed (SIGKILL) while requests flow", d.kill},
		{"What the data plane counted", d.countAll},
		{titleStop, d.stop},
	} {
		if step.title == titleStop && d.opts.Keep {
			break
		}
		d.Begin(step.title)
		begin := time.Now()
		err := step.do(ctx)
		d.facts.Steps = append(d.facts.Steps, Step{Title: step.title, Seconds: time.Since(begin).Seconds()})
		if err != nil {
			return err
		}
	}
	return nil
}

// build makes the namespaces, and starts a web server in each backend.
func (d *demo) build(ctx context.Context) error {
	top, err := lab.Build(ctx, lab.Options{Layout: lab.TwoArm, Backends: len(weights)})
	if err != nil {
		return err
	}
	d.top = top
	d.facts.ID, d.facts.Instance = top.ID(), instanceOf(top.ID())
	d.facts.Topology = top.Draw()
	d.Say("%s\n\n", story.Indent(d.facts.Topology))
	d.folder = folderOf(top.ID())
	if err := os.Mkdir(d.folder, 0o700); err != nil {
		return fmt.Errorf("make a folder for the configuration: %w", err)
	}
	if d.opts.Keep { // `go run` removes its binary when it ends
		kept := filepath.Join(d.folder, "shunt")
		if err := copyFile(d.opts.Executable, kept); err != nil {
			return fmt.Errorf("keep a copy of the program: %w", err)
		}
		d.opts.Executable, d.opts.Command = kept, kept
	}
	for _, host := range top.Backends {
		kid, err := d.startBackend(host)
		if err != nil {
			return err
		}
		d.kids = append(d.kids, kid)
	}
	d.Claim(true, "%d namespaces form a network of their own, and each backend has a web and a UDP server", len(top.Hosts()))
	return nil
}

// configure writes the file, and shows it.
func (d *demo) configure(context.Context) error {
	text := configText(d.top, d.socket(), len(weights))
	d.facts.Config = text
	d.Say("%s\n\n", story.Indent(text))
	return d.writeConfig(text)
}

// start starts the daemon, and waits until it forwards.
func (d *demo) start(ctx context.Context) error {
	d.Say("  # nsenter --net=/run/netns/%s shunt run --config %s --instance %s\n", d.top.Balancer.Namespace(), d.configPath(), d.facts.Instance)
	begin := time.Now()
	status, err := d.startDaemon(ctx)
	if err != nil {
		return err
	}
	seen, err := d.status(ctx)
	if err != nil {
		return err
	}
	d.facts.Attached = seen.Attached
	native := len(seen.Attached) == 2
	for _, a := range seen.Attached {
		native = native && a.Mode == "native"
		d.Say("  %s: XDP, %s mode\n", a.Interface, a.Mode)
	}
	d.Claim(seen.Forwarding && seen.Daemon != nil, "process %d forwards, %s after it was started", status.Daemon.Pid, millis(time.Since(begin)))
	d.Claim(native, "XDP runs in native mode on both interfaces")
	for i := range d.top.Backends {
		if _, err := d.awaitState(ctx, i, "active"); err != nil {
			return err
		}
	}
	d.Claim(true, "every backend has passed its first health check, %s after the start", millis(time.Since(begin)))
	return nil
}

// stop ends the daemon as a user would, and looks for its remains.
func (d *demo) stop(ctx context.Context) error {
	d.endFlows()
	begin := time.Now()
	if err := d.daemon.terminate(ctx); err != nil {
		return err
	}
	d.Claim(d.daemon.err == nil, "the daemon ended in %s, with exit code %d", millis(time.Since(begin)), d.daemon.cmd.ProcessState.ExitCode())
	pins := pinsOf(d.facts.Instance)
	d.Claim(len(pins) == 0, "no map and no program is pinned any more%s", story.Found(pins))
	attached, err := d.programsLeft()
	if err != nil {
		return err
	}
	d.Claim(len(attached) == 0, "no interface has an XDP program any more%s", story.Found(attached))
	return nil
}

// programsLeft names the balancer's interfaces that have an XDP program.
func (d *demo) programsLeft() (names []string, err error) {
	links, err := d.top.Balancer.Netlink().LinkList()
	if err != nil {
		return nil, fmt.Errorf("list the balancer's interfaces: %w", err)
	}
	for _, link := range links {
		if xdp := link.Attrs().Xdp; xdp != nil && xdp.Attached {
			names = append(names, link.Attrs().Name)
		}
	}
	return names, nil
}

func (d *demo) socket() string     { return filepath.Join(d.folder, "shunt.sock") }
func (d *demo) configPath() string { return filepath.Join(d.folder, "shunt.yaml") }
func (d *demo) logPath() string    { return filepath.Join(d.folder, "shunt.log") }

func (d *demo) control() *control.Client { return control.NewClient(d.socket()) }

// writeConfig replaces the file in one step, as an editor does.
func (d *demo) writeConfig(text string) error {
	if err := record.Replace(record.OS, d.configPath(), []byte(text)); err != nil {
		return fmt.Errorf("write the configuration: %w", err)
	}
	return nil
}

// until waits for a condition.
func until(ctx context.Context, limit time.Duration, what string, met func() (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not within %s", limit))
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := met()
		if err != nil {
			return fmt.Errorf("wait until %s: %w", what, err)
		}
		if ok {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w", what, context.Cause(ctx))
		case <-tick.C:
		}
	}
}

func millis(d time.Duration) string {
	return strconv.FormatInt(d.Milliseconds(), 10) + " ms"
}
