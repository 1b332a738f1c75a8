package host

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/shunt-lb/shunt/internal/lab"
	"golang.org/x/sys/unix"
)

// inLab runs f in a network namespace of its own.
func inLab(t *testing.T, f func() error) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
	l, err := lab.New("")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	a, err := l.AddHost("a")
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Run(f); err != nil {
		t.Fatal(err)
	}
}

// Settings are put back, the last one first; one that somebody else has changed since is left alone, one that is gone
// is forgotten, and one that cannot be put back is left to do.
func TestSettings(t *testing.T) {
	const ignore, announce, filter = "net/ipv4/conf/lo/arp_ignore", "net/ipv4/conf/lo/arp_announce", "net/ipv4/conf/lo/rp_filter"
	inLab(t, func() error {
		before := map[string]string{}
		for _, name := range []string{ignore, announce, filter} {
			var err error
			if before[name], err = ReadSetting(name); err != nil {
				return err
			}
		}
		var changed []Setting
		for _, s := range []Setting{{ignore, before[ignore], "1"}, {ignore, "1", "2"}, {announce, before[announce], "1"}} {
			if err := s.Apply(); err != nil {
				return err
			}
			changed = append(changed, s)
		}
		if err := (Setting{Name: announce, Set: "2"}).Apply(); err != nil { // somebody else
			return err
		}
		gone, stuck := Setting{"net/ipv4/conf/nobody/arp_ignore", "0", "1"}, Setting{filter, "nonsense", before[filter]}
		left, err := Restore(append(changed, gone, stuck))
		if !slices.Equal(left, []Setting{stuck}) || err == nil || !strings.Contains(err.Error(), filter) || !errors.Is(err, unix.EINVAL) {
			t.Errorf("left to do is %v: %v; want %v", left, err, stuck)
		}
		if now, err := ReadSetting(ignore); now != before[ignore] || err != nil {
			t.Errorf("%s is %q, and was %q: %v", ignore, now, before[ignore], err)
		}
		if now, err := ReadNumber(announce); now != 2 || err != nil {
			t.Errorf("what somebody else has set is %d: %v", now, err)
		}
		if all, err := Settings("net/ipv4/conf/*/arp_ignore"); !slices.Contains(all, ignore) || err != nil {
			t.Errorf("%s is not among %q: %v", ignore, all, err)
		}
		return nil
	})
}

func TestReadSettingFails(t *testing.T) {
	if _, err := ReadNumber("net/no/such"); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "read the setting net/no/such") {
		t.Errorf("of a setting that does not exist: %v", err)
	}
	if _, err := ReadNumber("kernel/ostype"); err == nil || !strings.Contains(err.Error(), "kernel/ostype") {
		t.Errorf("of a setting that is no number: %v", err)
	}
	if text, err := ReadSetting("kernel/ostype"); text != "Linux" || err != nil {
		t.Errorf("read %q: %v", text, err)
	}
}

// The calling thread's network namespace has another number, cookie and name than the first thread's.
func TestNamespaces(t *testing.T) {
	type identity struct {
		number, cookie uint64
		space          string
	}
	read := func() (i identity, err error) {
		var errs [3]error
		i.number, errs[0] = Netns()
		i.cookie, errs[1] = NetnsCookie()
		i.space, errs[2] = Space()
		return i, errors.Join(errs[:]...)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	outside, err := read()
	if err != nil {
		t.Fatal(err)
	}
	inLab(t, func() error {
		inside, err := read()
		if inside.number == outside.number || inside.cookie == outside.cookie || inside.space == outside.space {
			t.Errorf("inside %+v, outside %+v", inside, outside)
		}
		return err
	})
	if again, err := read(); again != outside || err != nil {
		t.Errorf("%+v, then %+v: %v", outside, again, err)
	}
}

func TestNamespace(t *testing.T) {
	for _, kind := range []string{"net", "mnt", "pid"} {
		link, err := os.Readlink(filepath.Join("/proc/self/ns", kind))
		if err != nil {
			t.Fatal(err)
		}
		number, err := Namespace("self", kind)
		if err != nil || link != kind+":["+strconv.FormatUint(number, 10)+"]" {
			t.Errorf("%s is %d, want %s: %v", kind, number, link, err)
		}
	}
	if _, err := Namespace("self", "none"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of a kind that does not exist: %v", err)
	}
	for kind, number := range map[string]uint64{"pid": 4026531836, "time": 4026531834, "mnt": 4026531841} {
		if !IsFirst(kind, number) || IsFirst(kind, number+1000) {
			t.Errorf("of %s %d is not the first, or another one is", kind, number)
		}
	}
}
