package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/internal/cli"
	"github.com/shunt-lb/shunt/internal/lab"
	"github.com/shunt-lb/shunt/test/churn"
	"github.com/shunt-lb/shunt/test/disk"
)

func TestDiagRefusesWhatMakesNoSense(t *testing.T) {
	for _, arguments := range [][]string{
		{"nosuch"}, {"io", "x"}, {"io", "-c", "0"}, {"io", "-T", "1", "--duration", "1s"}, {"io", "-T", "-1"}, {"io", "-t", "-1"},
		{"io", "-u", "-1"}, {"io", "-m=false"}, {"io", "-o", "xml"}, {"io", "-P", "-f"}, {"io", "--max-cpu", "x"}, {"io", "--logsize", "1"}, {"io", "--log", "x", "--logsize", "0"}, {"runq", "--max-cpu", "-1%"}, {"irqoff", "-f", "x", "--log", "y"}, {"top", "--log", "x"},
		{"ping"}, {"ping", "x"}, {"ping", "-s", "-c", "::1"}, {"ping", "-s", "-C", "1"}, {"ping", "-c", "no address"}, {"ping", "-c", "::1", "-b", "143"},
		{"ping", "-c", "::1", "-b", "70000"}, {"ping", "-c", "::1", "-i", "-1"}, {"ping", "-c", "::1", "-t", "-1"}, {"ping", "-c", "::1", "-m", "-1"},
		{"ping", "-c", "::1", "-o", "xml"}, {"ping", "-s", "-o", "log"}, {"ping", "-c", "::1", "--log", "x"}, {"ping", "-c", "::1", "--logbackup", "2"},
		{"ping", "-s", "-o", "image"}, {"ping", "-c", "::1", "--image", "x"}, {"ping", "-c", "::1", "-o", "log", "--image", "x"}, {"ping", "-c", "::1", "-o", "log", "--logsize", "0"}, {"ping", "-c", "fe80::1%nosuch", "-C", "-1"},
		{"ping", "-c", "::1", "--mode", "fast"}, {"ping", "-s", "--mode", "auto"}, {"ping", "-c", "::1", "--code", "2"}, {"ping", "-s", "--code", "1"}, {"ping", "-c", "::1", "--nslocal"},
		{"ping", "-s", "--userid", "7"}, {"ping", "-c", "::1", "-n", "--userid", "65536"},
		{"runq", "x"}, {"runq", "-t", "0"}, {"runq", "--duration", "-1s"}, {"runq", "--top", "-1"}, {"runq", "-p", "-1"}, {"runq", "-o", "xml"},
		{"irqoff", "x"}, {"irqoff", "0"}, {"irqoff", "-1s"}, {"irqoff", "1", "2"}, {"irqoff", "-t", "0"}, {"irqoff", "-t", "10001"}, {"irqoff", "-o", "xml"},
		{"memleak", "x"}, {"memleak", "-i", "99ms"}, {"memleak", "--duration", "-1s"}, {"memleak", "--top", "-1"}, {"memleak", "--max-cpu", "-1"}, {"memleak", "--sample", "3"},
		{"memleak", "--sample", "0"}, {"memleak", "--sample", "131072"}, {"memleak", "--table", "0"}, {"memleak", "--pid", "0"}, {"memleak", "--pid", "1", "--cgroup", "/"}, {"memleak", "--pid", "1", "--max-cpu", "1"}, {"memleak", "-o", "xml"},
		{"vdisk", "x"}, {"vdisk", "record"}, {"vdisk", "record", "--pid", "1"}, {"vdisk", "record", "--output", "/no/such"}, {"vdisk", "record", "--pid", "-1", "--output", "/no/such"},
		{"vdisk", "record", "--pid", "1", "--output", "/no/such", "--limit", "0"}, {"vdisk", "record", "--pid", "1", "--output", "/no/such", "--duration", "-1s"},
		{"vdisk", "record", "--pid", "1", "--output", "/no/such", "--probe", "main"}, {"vdisk", "report"}, {"vdisk", "report", "a", "b", "c"}, {"vdisk", "record", "--guest"}, {"vdisk", "record", "--guest", "--pid", "1", "--output", "/no/such"}, {"vdisk", "report", "a", "-o", "xml"}, {"vdisk", "report", "a", "-n", "-1"}, {"vdisk", "report", "a", "--chain", "--plot", "x"},
		{"top", "x"}, {"top", "-i", "99ms"}, {"top", "--duration", "-1s"}, {"top", "-t", "999us"}, {"top", "-t", "11s"}, {"top", "-o", "xml"},
		{"doctor", "x"}, {"doctor", "-o", "xml"},
	} {
		var out, errOut bytes.Buffer
		if code := Main(append([]string{"diag"}, arguments...), strings.NewReader(""), &out, &errOut); code != cli.ExitUsage || errOut.Len() == 0 {
			t.Errorf("%v: exit code %d, %s", arguments, code, errOut.String())
		}
	}
}

func TestDiagRefusesFiles(t *testing.T) {
	for _, arguments := range [][]string{{"io", "--btf", "/no/such"}, {"doctor", "--btf", "/no/such"}, {"io", "-d", "nosuch"}, {"runq", "--btf", "/no/such"},
		{"memleak", "--btf", "/no/such"}, {"memleak", "--cgroup", "/proc"}, {"top", "--btf", "/no/such"},
		{"vdisk", "record", "--pid", "1", "--output", "x", "--btf", "/no/such"}, {"vdisk", "report", "/no/such"}, {"vdisk", "report", "/proc/self/exe"}, {"vdisk", "report", "../vdisk/testdata/host.rec", "/no/such"},
		{"irqoff", "--btf", "/no/such"}, {"irqoff", "1", "-f", "/no/such/file"}} {
		var out, errOut bytes.Buffer
		if code := Main(append([]string{"diag"}, arguments...), strings.NewReader(""), &out, &errOut); code != cli.ExitRefused ||
			!strings.Contains(errOut.String(), arguments[len(arguments)-1]) {
			t.Errorf("%v: exit code %d, %s", arguments, code, errOut.String())
		}
	}
}

func TestDiagDoctor(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	var people, programs, errOut bytes.Buffer
	if code := Main([]string{"diag", "doctor"}, strings.NewReader(""), &people, &errOut); code != cli.ExitOK {
		t.Fatalf("exit code %d, %s%s", code, people.String(), errOut.String())
	}
	if code := Main([]string{"diag", "doctor", "-o", "json"}, strings.NewReader(""), &programs, &errOut); code != cli.ExitOK {
		t.Fatalf("exit code %d, %s", code, errOut.String())
	}
	var answer struct {
		BTF   string
		Tools []diagTool
	}
	if err := json.Unmarshal(programs.Bytes(), &answer); err != nil {
		t.Fatal(err)
	}
	if answer.BTF == "" || len(answer.Tools) != 7 || !answer.Tools[0].Runs || len(answer.Tools[0].Sensors) != 3 || !answer.Tools[1].Runs || len(answer.Tools[1].Sensors) != 7 ||
		!answer.Tools[2].Runs || len(answer.Tools[2].Sensors) != 3 ||
		!answer.Tools[3].Runs || len(answer.Tools[3].Sensors) != 5 ||
		!answer.Tools[4].Runs || len(answer.Tools[4].Sensors) != 14 ||
		!answer.Tools[5].Runs || len(answer.Tools[5].Sensors) != 7 ||
		answer.Tools[6].Tool != "vdisk --guest" || !answer.Tools[6].Runs || len(answer.Tools[6].Sensors) != 7 {
		t.Errorf("%+v", answer)
	}
	t.Log("\n" + people.String())
	// Some sensors of memleak have no way on some kernels, which is reported.
	for _, l := range slices.Concat(answer.Tools[0].Sensors, answer.Tools[1].Sensors, answer.Tools[2].Sensors, answer.Tools[3].Sensors, answer.Tools[5].Sensors, answer.Tools[6].Sensors) {
		if l.Way == "" || !strings.Contains(people.String(), l.Way) {
			t.Errorf("%+v is not told in\n%s", l, people.String())
		}
	}
}

// TestDiagPingWritesFiles has no server on this host, so the probe is reported when it is too old to wait for a
// report.
func TestDiagPingWritesFiles(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	log := filepath.Join(t.TempDir(), "trace.log")
	var out, errOut bytes.Buffer
	if code := Main([]string{"diag", "ping", "-c", "127.0.0.1", "-C", "1", "-o", "log", "--log", log}, strings.NewReader(""), &out, &errOut); code != cli.ExitOK {
		t.Fatalf("exit code %d, %s", code, errOut.String())
	}
	text, err := os.ReadFile(log)
	if err != nil || !strings.Contains(string(text), " 1: ") || !strings.Contains(out.String(), "1 sent, ") || strings.Contains(out.String(), " 1: ") {
		t.Errorf("%v: the log has %q, and the output is %s", err, text, out.String())
	}
	image := filepath.Join(t.TempDir(), "trace.svg")
	out.Reset()
	if code := Main([]string{"diag", "ping", "-c", "127.0.0.1", "-C", "2", "-i", "1000", "-o", "imagelog", "--log", log, "--image", image}, strings.NewReader(""), &out, &errOut); code != cli.ExitOK {
		t.Fatalf("exit code %d, %s", code, errOut.String())
	}
	drawn, err := os.ReadFile(image)
	if err != nil || !strings.Contains(string(drawn), "2 probes answered, 0 lost") || !strings.Contains(out.String(), "image: "+image) || strings.Contains(out.String(), " 1: ") {
		t.Errorf("%v: the image has %q, and the output is %s", err, drawn, out.String())
	}
	if more, err := os.ReadFile(log); err != nil || len(more) <= len(text) {
		t.Errorf("%v: the log has %q after %q", err, more, text)
	}
	if code := Main([]string{"diag", "ping", "-c", "127.0.0.1", "-o", "image", "--image", log + "/x"}, strings.NewReader(""), &out, &errOut); code != cli.ExitRefused {
		t.Errorf("an image that cannot be written: exit code %d, %s", code, errOut.String())
	}
	if code := Main([]string{"diag", "ping", "-c", "127.0.0.1", "-o", "log", "--log", log + "/x"}, strings.NewReader(""), &out, &errOut); code != cli.ExitRefused {
		t.Errorf("a log that cannot be written to: exit code %d, %s", code, errOut.String())
	}
}

// TestDiagPingHasTheOptionsOfPingTrace gives all options that the other tests do not.
func TestDiagPingHasTheOptionsOfPingTrace(t *testing.T) {
	var out, errOut bytes.Buffer
	for _, name := range []string{"-v", "--version"} {
		out.Reset()
		if code := Main([]string{"diag", "ping", name}, strings.NewReader(""), &out, &errOut); code != cli.ExitOK || !strings.HasPrefix(out.String(), "shunt version "+cli.Version()) {
			t.Errorf("%s: exit code %d, %s %s", name, code, out.String(), errOut.String())
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	out.Reset()
	arguments := []string{"diag", "ping", "--client", "127.0.0.1", "--count", "1", "--time", "20", "--bytes", "144", "--mode", "pingpong", "--code", "1",
		"-n", "--nslocal", "--userid", "3", "--debug"}
	if code := Main(arguments, strings.NewReader(""), &out, &errOut); code != cli.ExitOK {
		t.Fatalf("exit code %d, %s", code, errOut.String())
	}
	for want, in := range map[string]string{
		"debug: map sh_ping_trails: Array of 4096 elements": errOut.String(),
		"client 3, netns ":                   out.String(),
		"1 sent, 1 answered":                 out.String(),
		"probes of 144 bytes to 127.0.0.1 ":  out.String(),
		"1 answered probes for whose report": out.String(),
	} {
		if !strings.Contains(in, want) {
			t.Errorf("%q is not in\n%s", want, in)
		}
	}
}

// TestDiagRunqEndsWithASummary watches no process (the highest id is less), so that it has no waits.
func TestDiagRunqEndsWithASummary(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	var out, errOut bytes.Buffer
	if code := Main([]string{"diag", "runq", "-o", "json", "-p", "4294967295", "--duration", "100ms"}, strings.NewReader(""), &out, &errOut); code != cli.ExitOK {
		t.Fatalf("exit code %d, %s", code, errOut.String())
	}
	if text := out.String(); strings.Count(text, "\n") != 2 || !strings.HasPrefix(text, `{"type":"start"`) || !strings.Contains(text, `{"type":"summary"`) {
		t.Errorf("got %s", text)
	}
	out.Reset()
	if code := Main([]string{"diag", "runq", "--cgroup", "/proc"}, strings.NewReader(""), &out, &errOut); code != cli.ExitRefused || !strings.Contains(errOut.String(), "/proc") {
		t.Errorf("a folder that is no cgroup: exit code %d, %s", code, errOut.String())
	}
}

func TestDiagMemleakEndsWithASummary(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	var out, errOut bytes.Buffer
	arguments := []string{"diag", "memleak", "-o", "json", "--interval", "200ms", "--duration", "500ms", "--top", "3", "--addresses", "--max-cpu", "100"}
	defer churn.Begin(t)()
	if code := Main(arguments, strings.NewReader(""), &out, &errOut); code != cli.ExitOK {
		t.Fatalf("exit code %d, %s", code, errOut.String())
	}
	var types []string
	var last struct {
		Seconds    float64
		Rows       []struct{ State string }
		Confidence float64 `json:"confidence_percent"`
		Sensors    float64 `json:"sensors_cpu_percent"`
		Counts     map[string]struct{ Allocations uint64 }
	}
	for line := range strings.Lines(out.String()) {
		var object struct{ Type string }
		if err := json.Unmarshal([]byte(line), &object); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		types = append(types, object.Type)
		if err := json.Unmarshal([]byte(line), &last); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
	}
	// A machine that is slow has fewer intervals in this time.
	if types[0] != "start" || types[len(types)-1] != "summary" || last.Seconds < 0.5 || len(last.Rows) > 3 || last.Confidence <= 0 || last.Sensors <= 0 || last.Counts["kmalloc"].Allocations == 0 {
		t.Errorf("%v, %+v", types, last)
	}
}

func TestDiagIrqoffWritesAFile(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	file := filepath.Join(t.TempDir(), "late.txt")
	var out, errOut bytes.Buffer
	if code := Main([]string{"diag", "irqoff", "-t", "10000", "-f", file, "100ms"}, strings.NewReader(""), &out, &errOut); code != cli.ExitOK {
		t.Fatalf("exit code %d, %s", code, errOut.String())
	}
	text, err := os.ReadFile(file)
	if err != nil || out.Len() > 0 || !strings.Contains(string(text), "floor: ") || !strings.Contains(string(text), "TIME(irqoff)") || !strings.Contains(string(text), "events: ") {
		t.Errorf("%v: %s%s", err, out.String(), text)
	}
}

func TestDiagIOEndsWithASummary(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	var out, errOut bytes.Buffer
	if code := Main([]string{"diag", "io", "-j", "-t", "3", "--duration", "100ms"}, strings.NewReader(""), &out, &errOut); code != cli.ExitOK {
		t.Fatalf("exit code %d, %s", code, errOut.String())
	}
	var types []string
	var last struct {
		Type    string
		Seconds float64
	}
	for line := range strings.Lines(out.String()) {
		if err := json.Unmarshal([]byte(line), &last); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		types = append(types, last.Type)
	}
	// The time that it takes to attach the sensors, which is longer, is not part of the duration.
	if strings.Join(types, " ") != "start interval summary" || last.Seconds < 0.1 {
		t.Errorf("got %v, of %v s", types, last.Seconds)
	}
}

// stamped notes the time of its first line.
type stamped struct {
	bytes.Buffer
	first time.Time
}

func (s *stamped) Write(p []byte) (int, error) {
	if s.first.IsZero() {
		s.first = time.Now()
	}
	return s.Buffer.Write(p)
}

func TestDiagPingLastsFromItsStart(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs and to make network namespaces")
	}
	l, err := lab.New(fmt.Sprintf("lasts%d", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	host, err := l.AddHost("host")
	if err != nil {
		t.Fatal(err)
	}
	for _, role := range [][]string{{"-s"}, {"-c", "127.0.0.1"}} {
		var out stamped
		var errOut bytes.Buffer
		err = host.Run(func() error {
			if code := Main(append([]string{"diag", "ping", "-o", "json", "-t", "1"}, role...), strings.NewReader(""), &out, &errOut); code != cli.ExitOK {
				return fmt.Errorf("exit code %d, %s", code, errOut.String())
			}
			return nil
		})
		if took := time.Since(out.first); err != nil || took < time.Second {
			t.Errorf("%v: %v, %v after the first line:\n%s", role, err, took, out.String())
		}
	}
}

// TestDiagTopOnce has one screen, which says at its end how the streams went.
func TestDiagTopOnce(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	var out, errOut bytes.Buffer
	if code := Main([]string{"diag", "top", "--once", "-i", "100ms", "-o", "json"}, strings.NewReader(""), &out, &errOut); code != cli.ExitOK {
		t.Fatalf("exit code %d, %s", code, errOut.String())
	}
	all := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(all) != 3 || !strings.HasPrefix(all[0], `{"type":"start"`) || !strings.HasPrefix(all[1], `{"type":"screen"`) || !strings.HasPrefix(all[2], `{"type":"summary"`) {
		t.Errorf("got %s", out.String())
	}
}

// TestDiagVdiskReports reads a recording that the package's tests have made.
func TestDiagVdiskReports(t *testing.T) {
	const recording = "../vdisk/testdata/two-writes.rec"
	const host, guest = "../vdisk/testdata/host.rec", "../vdisk/testdata/guest.rec"
	plot := filepath.Join(t.TempDir(), "plot.svg")
	for _, test := range []struct {
		arguments []string
		want      string
	}{
		{[]string{recording}, "most of the time is in the layer device"},
		{[]string{recording, "--all"}, "all requests"},
		{[]string{recording, "-o", "json"}, `{"type":"request","number":1`},
		{[]string{host, guest}, "joined with the host's: 2 (66.7 %)"},
		{[]string{host, guest, "--chain", "--all"}, "disk          sda at sector 32, 8192 bytes, of a.qcow2 at 1073758208"},
		{[]string{guest}, "most of the time is in the layer below"},
		{[]string{guest, host, "-o", "json"}, `{"type":"guest_request","number":1`},
		{[]string{host, guest, "--plot", plot}, ""},
		{[]string{guest, "--plot", plot}, ""},
		{[]string{recording, "--plot", plot}, ""},
	} {
		var out, errOut bytes.Buffer
		if code := Main(append([]string{"diag", "vdisk", "report"}, test.arguments...), strings.NewReader(""), &out, &errOut); code != cli.ExitOK || !strings.Contains(out.String(), test.want) {
			t.Errorf("%v: exit code %d, %s%s", test.arguments, code, out.String(), errOut.String())
		}
	}
	if text, err := os.ReadFile(plot); err != nil || !strings.HasSuffix(string(text), "</svg>\n") {
		t.Errorf("%v: %s", err, text)
	}
	var out, errOut bytes.Buffer
	if code := Main([]string{"diag", "vdisk", "report", recording, "--plot", plot + "/x"}, strings.NewReader(""), &out, &errOut); code != cli.ExitRefused || !strings.Contains(errOut.String(), plot) {
		t.Errorf("a plot that cannot be written: exit code %d, %s", code, errOut.String())
	}
}

// ioLine has the fields that the tests read of an interval of `shunt diag io -o json`.
type ioLine struct {
	Type    string
	Seconds float64
	Disks   []struct{ Device string }
	Rows    []ioRow
	Hidden  int `json:"rows_not_shown"`
}

type ioRow struct {
	PID    int
	Device string
	Path   string   `json:"filepath"`
	Sizes  []uint64 `json:"wr_sizes"`
}

// hasOnly reports whether there are rows, and is holds for all of them.
func (l ioLine) hasOnly(is func(ioRow) bool) bool {
	return len(l.Rows) > 0 && !slices.ContainsFunc(l.Rows, func(r ioRow) bool { return !is(r) })
}

// TestDiagIOHasTheOptionsOfIofsstat gives each of them once while this process writes to a disk.
func TestDiagIOHasTheOptionsOfIofsstat(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to load BPF programs")
	}
	device := disk.InMemory(t, 1<<20)
	file, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		var err error
		for err == nil && ctx.Err() == nil {
			if _, err = file.WriteAt(make([]byte, 64<<10), 0); err == nil {
				err = file.Sync()
			}
		}
		done <- err
	}()
	defer func() {
		cancel()
		if err := errors.Join(<-done, file.Close()); err != nil {
			t.Error(err)
		}
	}()
	name := filepath.Base(device)
	for _, test := range []struct {
		arguments string
		fits      func(ioLine) bool
	}{
		{fmt.Sprintf("-d %s -p %d -T 1 -c 1 -m -f", name, os.Getpid()), func(l ioLine) bool {
			return l.Seconds >= 1 && l.hasOnly(func(r ioRow) bool { return r.Device == name && r.PID == os.Getpid() && r.Path == device })
		}},
		{"-d " + name + " -f=false", func(l ioLine) bool { return l.hasOnly(func(r ioRow) bool { return r.Path == "-" }) }},
		{"-p 4294967295", func(l ioLine) bool { return len(l.Rows) == 0 && l.Hidden > 0 }},
		{"-d " + name + " -P", func(l ioLine) bool { return l.hasOnly(func(r ioRow) bool { return len(r.Sizes) > 0 }) }},
		{"-n", func(l ioLine) bool { return len(l.Disks) == 0 && len(l.Rows) > 0 }},
		{"-t 1", func(l ioLine) bool { return len(l.Rows) == 1 }},
		{"-u 1000", func(l ioLine) bool { return len(l.Disks) == 0 && len(l.Rows) == 0 && l.Hidden > 0 }},
		{"-b 1e15", func(l ioLine) bool { return len(l.Rows) == 0 && l.Hidden > 0 }},
		{"-i 1e15", func(l ioLine) bool { return len(l.Rows) == 0 && l.Hidden > 0 }},
	} {
		arguments := append([]string{"diag", "io", "-j"}, strings.Fields(test.arguments)...)
		if !slices.Contains(arguments, "-T") {
			arguments = append(arguments, "--duration", "300ms")
		}
		var out, errOut bytes.Buffer
		if code := Main(arguments, strings.NewReader(""), &out, &errOut); code != cli.ExitOK {
			t.Fatalf("%v: exit code %d, %s", arguments, code, errOut.String())
		}
		fits := false
		for line := range strings.Lines(out.String()) {
			var l ioLine
			if err := json.Unmarshal([]byte(line), &l); err != nil {
				t.Fatalf("%v: %s", err, line)
			}
			fits = fits || l.Type == "interval" && test.fits(l)
		}
		if !fits {
			t.Errorf("%v: no interval is as asked for:\n%s", arguments, out.String())
		}
	}
}
