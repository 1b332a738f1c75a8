package control

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os/user"
	"strconv"
	"strings"
	"unicode"

	"github.com/shunt-lb/shunt/internal/lb/state"
	"golang.org/x/sys/unix"
)

// peer is the process at the other end, as the kernel noted it when it connected
// (SO_PEERCRED, unix(7)).
type peer struct {
	pid int32
	uid uint32
}

// peerOf asks the kernel.
func peerOf(c *net.UnixConn) (peer, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return peer{}, err
	}
	var credentials *unix.Ucred
	var failed error
	if err := raw.Control(func(fd uintptr) {
		credentials, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return peer{}, err
	}
	if failed != nil {
		return peer{}, fmt.Errorf("ask which process is at the other end of the socket: %w", failed)
	}
	return peer{credentials.Pid, credentials.Uid}, nil
}

// userHeader is who called sudo. It is believed only from root, who could be anybody anyway.
const userHeader = "Shunt-User"

// instanceHeader is the instance that a request is meant for. Without it, whichever answers is meant.
const instanceHeader = "Shunt-Instance"

// wordBytesMax keeps a client from filling the file of overrides with its name.
const wordBytesMax = 64

// authorOf is who asks.
func authorOf(ctx context.Context, header http.Header) state.Author {
	a := state.Author{Client: word(header.Get("User-Agent"))}
	c, known := ctx.Value(connKey{}).(*conn)
	if !known {
		a.By = "unknown"
		return a
	}
	a.UID = c.peer.uid
	a.By = "uid " + strconv.FormatUint(uint64(a.UID), 10)
	if u, err := user.LookupId(strconv.FormatUint(uint64(a.UID), 10)); err == nil {
		a.By = u.Username
	}
	if said := word(header.Get(userHeader)); a.UID == 0 && said != "" {
		a.By = said
	}
	return a
}

// word is what a client says about itself, without what a terminal would act on.
func word(text string) string {
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == unicode.ReplacementChar {
			return -1
		}
		return r
	}, text)
	return strings.ToValidUTF8(text[:min(len(text), wordBytesMax)], "")
}
