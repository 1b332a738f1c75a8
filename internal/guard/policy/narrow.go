package policy

import (
	"math"
	"path"
	"regexp"
	"strconv"
	"strings"

	"github.com/shunt-lb/shunt/internal/config"
)

// The limits of a cgroup's path, the same as in the programs' comparison.
const (
	CgroupDepthMax = 8
	CgroupNameMax  = 94 // bytes of a part: the programs compare one byte more, so that a longer name differs
)

// userName is a user's name, as useradd(8) of Debian and others permit it.
var userName = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_.-]*\$?$`)

// narrow reads user and cgroup, which limit where programs are trusted.
func (t *Trust) narrow(e *trustEntry, faults *config.Faults) {
	if at, key := e.User.Mark, "user"; e.User.Set || e.Cgroup.Set {
		if !e.User.Set {
			at, key = e.Cgroup.Mark, "cgroup"
		}
		if !e.Programs.Set {
			faults.Errorf(at, "name the programs, too", "%s without programs trusts no program: user and cgroup only narrow the trust in programs, because root can become any user and enter any cgroup", key)
		}
	}
	if t.User = e.User.Value; t.User != "" && !userName.MatchString(t.User) {
		if number, err := strconv.ParseUint(t.User, 10, 32); err != nil || number == math.MaxUint32 {
			faults.Errorf(e.User.Mark, "write a name such as backup, or a number", "%q is no user", t.User)
			t.User = ""
		}
	}
	if e.Cgroup.Value != "" {
		t.Cgroup = cgroupPath(e.Cgroup, faults)
	}
}

// cgroupPath returns the path of a cgroup; empty: it is faulty.
func cgroupPath(item config.Phrase, faults *config.Faults) string {
	clean := path.Clean(item.Value)
	parts := strings.Split(strings.TrimPrefix(clean, "/"), "/")
	refuse := func(suggestion, format string, args ...any) string {
		faults.Errorf(item.Mark, suggestion, format, args...)
		return ""
	}
	switch {
	case !path.IsAbs(item.Value):
		return refuse("begin it with /", "the cgroup %q is not absolute", item.Value)
	case clean == "/":
		return refuse("name a cgroup below it", "all processes are in the cgroup /")
	case strings.HasPrefix(clean+"/", "/sys/fs/cgroup/"):
		return refuse("write it as /proc/PID/cgroup has it, such as /system.slice/app.service", "%s is a folder, and the cgroup's path begins at the root of the hierarchy", clean)
	case len(parts) > CgroupDepthMax:
		return refuse("name one above it", "the cgroup is %d deep, and at most %d are compared", len(parts), CgroupDepthMax)
	}
	for _, part := range parts {
		if len(part) > CgroupNameMax {
			return refuse("name one above it", "%q has %d bytes, and names of at most %d are compared", part, len(part), CgroupNameMax)
		}
	}
	return clean
}
