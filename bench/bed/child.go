package bed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/lab"
)

// Program is a program that a benchmark runs, and its Debian package.
type Program struct{ Name, Package string }

// Need checks that all programs are installed, and names the packages of the missing ones.
func Need(programs ...Program) error {
	var missing []string
	for _, p := range programs {
		if _, err := exec.LookPath(p.Name); err != nil {
			missing = append(missing, fmt.Sprintf("%s (Debian package %s)", p.Name, p.Package))
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("not installed: %s", strings.Join(missing, ", "))
	}
	return nil
}

// Versions are the versions of the programs' packages.
func Versions(ctx context.Context, programs []Program) map[string]string {
	all := map[string]string{}
	for _, p := range programs {
		out, err := exec.CommandContext(ctx, "dpkg-query", "-W", "-f", "${Version}", p.Package).Output()
		if err != nil {
			out = []byte("not from Debian's package " + p.Package)
		}
		all[p.Name] = string(out)
	}
	return all
}

// BuildShunt builds the program from this repository, statically, into a file.
func BuildShunt(ctx context.Context, file string) error {
	build := exec.CommandContext(ctx, "go", "build", "-o", file, "github.com/shunt-lb/shunt/cmd/shunt")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build shunt: %w\n%s", err, out)
	}
	return nil
}

// Child is a process on a host.
type Child struct {
	cmd    *lab.Command
	output lockedBuffer
	ended  chan struct{} // closed when it has been waited for
	err    error         // of the wait; valid once ended is closed
}

// lockedBuffer collects output while somebody may read it.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Start runs a program on a host. Its output is kept for error messages.
func (b *Bed) Start(host, program string, args ...string) (*Child, error) {
	c := &Child{cmd: b.hosts[host].Command(context.Background(), program, args...), ended: make(chan struct{})}
	c.cmd.Stdout, c.cmd.Stderr = &c.output, &c.output
	// In a group of its own, so that Ctrl-C reaches it only through Stop.
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.cmd.WaitDelay = 5 * time.Second
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		c.err = c.cmd.Wait()
		close(c.ended)
	}()
	return c, nil
}

// Stop ends a process politely, then firmly after ten seconds.
func (c *Child) Stop() error {
	select {
	case <-c.ended:
		return fmt.Errorf("%s ended by itself: %v\n%s", c.cmd.Path, c.err, c.output.String())
	default:
	}
	if err := c.cmd.Process.Signal(unix.SIGTERM); err != nil {
		return fmt.Errorf("stop %s: %w", c.cmd.Path, err)
	}
	select {
	case <-c.ended:
		return nil
	case <-time.After(10 * time.Second):
	}
	err := c.cmd.Process.Kill()
	<-c.ended
	return errors.Join(fmt.Errorf("%s did not end within 10 s of SIGTERM and was killed", c.cmd.Path), err)
}

// Ended is closed when the process has ended.
func (c *Child) Ended() <-chan struct{} { return c.ended }

// Output is the process's output so far.
func (c *Child) Output() string { return c.output.String() }

// Run runs a program on a host to its end and returns its standard output.
func (b *Bed) Run(ctx context.Context, host, program string, args ...string) (string, error) {
	return b.RunInput(ctx, host, "", program, args...)
}

// RunInput is Run with something on standard input.
func (b *Bed) RunInput(ctx context.Context, host, input, program string, args ...string) (string, error) {
	cmd := b.hosts[host].Command(ctx, program, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s %s: %w\n%s%s", program, strings.Join(args, " "), err, stdout.String(), stderr.String())
	}
	return stdout.String(), nil
}

// WaitHTTP asks for a page, each time over a new connection, until the answer is body. It
// gives up when ctx ends, when a process in alive ends, or after ten seconds.
func (b *Bed) WaitHTTP(ctx context.Context, target netip.AddrPort, body string, alive ...*Child) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var last error
	for {
		if last = b.askHTTP(ctx, target, body); last == nil {
			return nil
		}
		for _, c := range alive {
			select {
			case <-c.ended:
				return fmt.Errorf("%s ended: %v\n%s", c.cmd.Path, c.err, c.Output())
			default:
			}
		}
		select {
		case <-ctx.Done():
			var said strings.Builder
			for _, c := range alive {
				fmt.Fprintf(&said, "\n%s said:\n%s", c.cmd.Path, c.Output())
			}
			return fmt.Errorf("no answer from http://%s/ in 10 s: %w%s", target, last, said.String())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// askHTTP makes one request from the client and checks the answer.
func (b *Bed) askHTTP(ctx context.Context, target netip.AddrPort, body string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: b.hosts[Client].Dial}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+target.String()+"/", nil)
	if err != nil {
		return err
	}
	reply, err := transport.RoundTrip(request)
	if err != nil {
		return err
	}
	defer reply.Body.Close()
	got, err := io.ReadAll(reply.Body)
	if err != nil {
		return err
	}
	if reply.StatusCode != http.StatusOK || string(got) != body {
		return fmt.Errorf("answer %s %q, want 200 %q", reply.Status, got, body)
	}
	return nil
}
