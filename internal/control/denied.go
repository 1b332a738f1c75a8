package control

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// Denied gives the reason why this user may not ask at a socket, and the remedy. key is the setting that
// admits a group to the socket, under `api` in the configuration. It wraps ErrDenied.
//
// The kernel checks permissions first, so a socket that a killed daemon has left denies like one with a
// listener. The list of listeners can be read.
func Denied(path, key string) error {
	say := func(why, next string) error {
		return fmt.Errorf("ask the daemon at %s: %w, %s; %s", path, ErrDenied, why, next)
	}
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrPermission) {
		return say("because this user may not look into the socket's folder", "run the command with sudo")
	}
	if known, heard := listens(path); err == nil && known && !heard {
		return say("and no process in this network namespace listens there: the daemon was killed, or runs in another network namespace", "run the command with sudo")
	}
	group := ""
	if err == nil && info.Mode().Perm()&0o020 != 0 {
		if s, ok := info.Sys().(*syscall.Stat_t); ok {
			group = groupName(s.Gid)
		}
	}
	if group == "" {
		return say("because only root may use the socket", fmt.Sprintf("run the command with sudo, or let root name one of your groups in the configuration: `api: {%s: …}`", key))
	}
	return say(fmt.Sprintf("because only root and the group %s may use the socket", group), "run the command with sudo, or let root add you to that group")
}

// groupName returns a group's name, or its number if it has no name.
func groupName(gid uint32) string {
	number := strconv.FormatUint(uint64(gid), 10)
	if g, err := user.LookupGroupId(number); err == nil {
		return g.Name
	}
	return number
}

// listens reports whether a process of this network namespace listens at a path, spelled as the process did.
func listens(path string) (known, heard bool) {
	absolute, err := filepath.Abs(path)
	if err != nil {
		return false, false
	}
	text, err := os.ReadFile("/proc/thread-self/net/unix")
	if err != nil {
		return false, false
	}
	const accepting = 0x10000 // __SO_ACCEPTCON of linux/net.h
	for line := range strings.Lines(string(text)) {
		// Number, references, protocol, flags, type, state, inode, path (unix_seq_show of net/unix/af_unix.c).
		fields := strings.Fields(line)
		if len(fields) < 8 || !strings.HasSuffix(line, " "+absolute+"\n") {
			continue
		}
		if flags, err := strconv.ParseUint(fields[3], 16, 32); err == nil && flags&accepting != 0 {
			return true, true
		}
	}
	return true, false
}
