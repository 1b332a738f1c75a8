package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/cli/tool"
	"github.com/shunt-lb/shunt/internal/diag/ping"
	"github.com/shunt-lb/shunt/sensor"
)

// The files of probes with -o log, and with -o image.
const (
	logDefault   = "./trace.log"
	imageDefault = "./trace.svg"
)

// diagPingOptions are set by the command line.
type diagPingOptions struct {
	server          bool
	client          string
	count           uint64
	interval        int64 // µs
	seconds         int
	above           int64 // µs
	bytes           int
	log, image      string
	logSize         int // MiB
	logBackups      int
	output, btf     string
	address         netip.Addr
	given, logNamed bool // an option of clients; --log
	imageNamed      bool
	mode            string
	code            uint8
	places, oneHost bool
	userID          uint16
	userNamed       bool // --userid
	debug           bool
	port            uint16
}

func newDiagPing(s cli.Streams) *cobra.Command {
	var o diagPingOptions
	c := &cobra.Command{
		Use:   "ping",
		Short: "Show in which stage of which host a packet loses its time (needs root)",
		Long: `Send probes to a host and show how long each took in each stage of both hosts, until Ctrl-C, which
prints a summary. On the other host, run "shunt diag ping -s".

Probes are ICMP echo requests, which the other host's kernel answers; the process there only reports.
Without this process, the client shows its own stages. With --port, given on both hosts, probes are UDP
datagrams, which the other host's process answers. Such probes pass a load balancer, which would answer
ICMP itself. If the balancer is shunt with "stamp_probes: true", and "shunt diag ping -s" runs there too,
the command also shows the time in the balancer's program.

The stages follow each other, so their sum is the round trip; if it is not, the line says so. The clocks
of both hosts are compared, with a bound of the error. For a lost probe the line names the last point
where it was seen, and the kernel's reason for the drop, if a sensor saw it.`,
		Example: `  sudo shunt diag ping -s                              # on the other host
  sudo shunt diag ping -c 10.0.0.2 -i 100000 -m 1000   # ten probes a second; show those of more than 1 ms
  sudo shunt diag ping -c 192.0.2.10 --port 7007       # through a balancer to servers with -s --port 7007`,
		Version: cli.Version() + " " + runtime.Version(),
		Args:    cli.NoArguments,
		RunE: func(c *cobra.Command, _ []string) error {
			for _, name := range []string{"count", "interval", "maxdelay", "bytes", "log", "logsize", "logbackup", "image", "mode", "code"} {
				o.given = o.given || c.Flags().Changed(name)
			}
			o.userNamed = c.Flags().Changed("userid")
			o.logNamed = c.Flags().Changed("log") || c.Flags().Changed("logsize") || c.Flags().Changed("logbackup")
			o.imageNamed = c.Flags().Changed("image")
			if err := o.complete(); err != nil {
				return err
			}
			types, err := tool.FindTypes(o.btf)
			if err != nil {
				return err
			}
			ctx, cancel := tool.Context(c.Context())
			defer cancel()
			if o.server {
				return tool.Privileges(ping.Serve(ctx, ping.ServerOptions{BTF: types, Duration: o.duration(), JSON: o.output == "json",
					Places: o.places, OneHost: o.oneHost, UserID: o.userID, Port: o.port, Debug: o.debugTo(s)}, s.Out))
			}
			return tool.Privileges(o.run(ctx, types, s))
		},
	}
	c.SetVersionTemplate("shunt version {{.Version}}\n")
	f := c.Flags()
	f.BoolVarP(&o.server, "server", "s", false, "report to clients this host's timestamps of their probes")
	f.StringVarP(&o.client, "client", "c", "", "send probes to this address")
	f.Uint64VarP(&o.count, "count", "C", 0, "end after this many probes; 0: at Ctrl-C")
	f.Int64VarP(&o.interval, "interval", "i", 1_000_000, "µs between probes")
	f.IntVarP(&o.seconds, "time", "t", 0, "end after this many seconds; 0: at Ctrl-C")
	f.Int64VarP(&o.above, "maxdelay", "m", 0, "show only probes with a round trip of more than this many µs, and lost probes; the summary and an image include all probes")
	f.IntVarP(&o.bytes, "bytes", "b", 556, fmt.Sprintf("bytes of a probe, without the IP header; at least %d", ping.BytesMin))
	f.StringVar(&o.log, "log", logDefault, "file to which -o log appends probes")
	f.StringVar(&o.image, "image", imageDefault, "file that -o image writes at the end")
	f.IntVar(&o.logSize, "logsize", 100, "size in MiB at which the log is renamed and a new log begins")
	f.IntVar(&o.logBackups, "logbackup", 3, "number of renamed logs to keep, the newest; 0: all")
	f.StringVar(&o.mode, "mode", string(ping.ModeAuto), "messages that a probe waits for: compact: the answer and the server's report; pingpong: only the answer, and the next probe waits for it, too; auto: compact, as long as reports come")
	f.BoolVarP(&o.places, "namespace", "n", false, "note the places that probes pass in all network namespaces of this host")
	f.BoolVar(&o.oneHost, "nslocal", false, "with -n: client and server are on one host, so that the client's places are enough")
	f.Uint16Var(&o.userID, "userid", 0, "with -n: a number to show beside this host's places")
	f.Uint8Var(&o.code, "code", 0, "code of the ICMP echo requests: 0, or 1 as in PingTrace")
	f.Uint16Var(&o.port, "port", 0, "send probes as UDP datagrams to this port, at which -s answers them; 0: as ICMP echo requests")
	f.BoolVar(&o.debug, "debug", false, "log programs, maps and sockets, and the verifier's log of refused programs, to standard error")
	tool.BTFFlag(c, &o.btf)
	f.StringVarP(&o.output, "output", "o", "text", "output format: text, json, log (probes as text in a file), image (a drawing of probes, SVG), or imagelog (both files)")
	return c
}

func (o *diagPingOptions) complete() error {
	switch {
	case o.server == (o.client != ""):
		return cli.UsageError{Err: errors.New("give either -s, to be the server, or -c ADDRESS, to send probes to a server")}
	case o.seconds < 0 || o.interval < 0 || o.above < 0:
		return cli.UsageError{Err: errors.New("-t, -i and -m cannot be negative")}
	case o.output != "text" && o.output != "json" && (!o.logs() && !o.draws() || o.server):
		return cli.UsageError{Err: fmt.Errorf("--output is text or json, or for a client log, image or imagelog; not %q", o.output)}
	case o.logNamed && !o.logs():
		return cli.UsageError{Err: errors.New("--log, --logsize and --logbackup need -o log: give -o log, too")}
	case o.imageNamed && !o.draws():
		return cli.UsageError{Err: errors.New("--image needs -o image: give -o image, too")}
	case o.logSize < 1 || o.logBackups < 0:
		return cli.UsageError{Err: errors.New("--logsize must be at least 1, and --logbackup cannot be negative")}
	case o.server && o.given:
		return cli.UsageError{Err: errors.New("-C, -i, -m, -b, --mode, --code and the log are for clients: a server only reports")}
	case !slices.Contains(ping.Modes, ping.Mode(o.mode)):
		return cli.UsageError{Err: fmt.Errorf("--mode is auto, pingpong or compact; not %q", o.mode)}
	case o.code > ping.CodeMax:
		return cli.UsageError{Err: fmt.Errorf("--code is 0 or %d, not %d", ping.CodeMax, o.code)}
	case o.code != 0 && o.port != 0:
		return cli.UsageError{Err: errors.New("--code is for ICMP, and --port for UDP: give one of them")}
	case !o.places && (o.oneHost || o.userNamed):
		return cli.UsageError{Err: errors.New("--nslocal and --userid need -n: give -n, too")}
	case o.bytes < ping.BytesMin || o.bytes > ping.BytesMax:
		return cli.UsageError{Err: fmt.Errorf("--bytes must be from %d to %d, not %d", ping.BytesMin, ping.BytesMax, o.bytes)}
	}
	if o.server {
		return nil
	}
	var err error
	if o.address, err = netip.ParseAddr(o.client); err != nil {
		return cli.UsageError{Err: fmt.Errorf("--client %q is not an IP address", o.client)}
	}
	return nil
}

func (o *diagPingOptions) logs() bool { return o.output == "log" || o.output == "imagelog" }

func (o *diagPingOptions) draws() bool { return o.output == "image" || o.output == "imagelog" }

func (o *diagPingOptions) duration() time.Duration { return time.Duration(o.seconds) * time.Second }

// run runs a client.
func (o *diagPingOptions) run(ctx context.Context, types sensor.BTF, s cli.Streams) (err error) {
	p := &ping.Printer{Out: s.Out, JSON: o.output == "json", Above: time.Duration(o.above) * time.Microsecond}
	if o.draws() {
		// The file is made at the beginning, so that a run is not in vain.
		image, openErr := os.Create(o.image)
		if openErr != nil {
			return fmt.Errorf("make the file of the image: %w", openErr)
		}
		p.Image, p.Log = &ping.Image{}, io.Discard
		defer func() { err = errors.Join(err, o.draw(p.Image, image, s)) }()
	}
	if o.logs() {
		log, openErr := tool.OpenRotated(o.log, 0o644, o.logSize, o.logBackups)
		if openErr != nil {
			return openErr
		}
		defer func() { err = errors.Join(err, log.Close()) }()
		p.Log = log
	}
	return ping.Run(ctx, ping.Options{BTF: types, Server: o.address, Count: o.count, Duration: o.duration(),
		Interval: time.Duration(o.interval) * time.Microsecond, Bytes: o.bytes, Mode: ping.Mode(o.mode), Code: o.code,
		Places: o.places, OneHost: o.oneHost, UserID: o.userID, Port: o.port, Debug: o.debugTo(s)}, p)
}

// debugTo is the writer to which --debug logs the loaded objects; nil: none.
func (o *diagPingOptions) debugTo(s cli.Streams) io.Writer {
	if o.debug {
		return s.Err
	}
	return nil
}

// draw writes the image, and prints its path.
func (o *diagPingOptions) draw(image *ping.Image, file *os.File, s cli.Streams) error {
	if err := errors.Join(image.Write(file), file.Close()); err != nil {
		return fmt.Errorf("write the image: %w", err)
	}
	_, err := fmt.Fprintf(s.Out, "image: %s\n", o.image)
	return err
}
