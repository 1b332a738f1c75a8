package detect

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/shunt-lb/shunt/internal/guard/rule"
)

// Opens that no rule can match are no events; opens of a file that a rule is about are.
func TestOpensThatNoRuleIsAbout(t *testing.T) {
	const times, programs = 400, 4
	for i, c := range []struct {
		condition string
		is        bool
	}{
		{`true`, true}, {`file.path == "NOISE"`, true}, {`file.write && file.name == "noise"`, true}, {`file.path.matches("/noise$")`, true}, {`file.path.matches("/[0-9]+/nois[a-z]+$")`, true},
		{`file.path == "/etc/shadow"`, false}, {`!file.write && file.name == "noise"`, false}, {`file.path.matches("^/etc/g?shadow-?$")`, false},
	} {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			q := newQuietIf(t, "names", c.condition)
			q.open(times, programs)
			before := cpuTime(t)
			opens, executed, counts := q.read()
			t.Logf("%s: %d events of opens, %.3f s of CPU to read them", c.condition, counts.Received-uint64(executed), cpuTime(t)-before)
			if want := map[bool]int{true: times}[c.is]; opens != want || executed != programs+1 || counts.Lost > 0 {
				t.Errorf("%s: %d opens were told, want %d, and %d programs: %+v", c.condition, opens, want, executed, counts)
			}
		})
	}
}

// cpuTime is the CPU time of this process in seconds.
func cpuTime(t *testing.T) float64 {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

func TestFilters(t *testing.T) {
	long := strings.Repeat("x", 55)
	on := func(condition string) Options {
		return Options{Rules: []rule.Rule{{On: []string{rule.Open}, If: condition}}}
	}
	for _, c := range []struct {
		options Options
		filters uint32
		names   int
	}{
		{on(`file.path == "/a"`), 3, 2}, {on(`file.write && file.path == "/a"`), 3, 1}, {on(`file.write`), 1, 0}, {on(`true`), 0, 0},
		{on(`file.name == "` + long[1:] + `"`), 3, 2}, {on(`file.name == "` + long + `"`), 0, 0}, {Options{}, 3, 0}, {Options{All: true, Rules: on(`file.path == "/a"`).Rules}, 0, 0},
	} {
		if filters, names := filtersFor(c.options); filters != c.filters || len(names) != c.names {
			t.Errorf("%+v: filters %d, %d names", c.options, filters, len(names))
		}
	}
}

// A file that is a mount's root has its name elsewhere.
func TestOpenOfMountedFile(t *testing.T) {
	q := newQuietIf(t, "mounted", `file.path == "NOISE"`)
	other := filepath.Join(t.TempDir(), "other")
	for _, file := range []string{other, q.noise} {
		if err := os.WriteFile(file, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount(other, q.noise, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(q.noise, 0) })
	q.open(10, 1)
	if opens, _, counts := q.read(); opens != 10 {
		t.Errorf("%d opens of a file that is mounted over another: %+v", opens, counts)
	}
}

// The root of a mount has the name of its mount point: a file below is reported by that name, and not by another one.
func TestOpenBelowMount(t *testing.T) {
	for i, c := range []struct {
		condition string
		want      int
	}{{`file.path.matches("/00[1-9]/[^/]+$")`, 10}, {`file.path.matches("/00[1-9]/noise/[^/]+$")`, 0}} {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			q := newQuietIf(t, "below", c.condition)
			folder := filepath.Dir(q.noise) // t.TempDir's, which ends in 001 and so on
			if err := unix.Mount("tmpfs", folder, "tmpfs", 0, ""); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Unmount(folder, 0) })
			q.open(10, 1)
			if opens, _, counts := q.read(); opens != c.want {
				t.Errorf("%s: %d opens of a file in a mount's root: %+v", c.condition, opens, counts)
			}
		})
	}
}
