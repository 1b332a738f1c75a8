package control

import (
	"context"
	"net"
	"net/http"
	"os/user"
	"strconv"
	"strings"
	"unicode"

	"github.com/shunt-lb/shunt/internal/host"
)

// peer is the process at the other end.
type peer struct {
	pid int32
	uid uint32
}

// peerOf asks the kernel.
func peerOf(c *net.UnixConn) (peer, error) {
	who, err := host.Peer(c)
	if err != nil {
		return peer{}, err
	}
	return peer{who.Pid, who.Uid}, nil
}

// userHeader names the caller of sudo. It is believed only from root, who could be any user anyway.
const userHeader = "Shunt-User"

// instanceHeader names the instance that a request is meant for. Without it, any instance is meant.
const instanceHeader = "Shunt-Instance"

// wordBytesMax keeps a client from filling the file of overrides with its name.
const wordBytesMax = 64

// authorOf returns the author of a request.
func authorOf(ctx context.Context, header http.Header) Author {
	a := Author{Client: word(header.Get("User-Agent"))}
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

// word returns a client's statement about itself, without the characters that a terminal would act on.
func word(text string) string {
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == unicode.ReplacementChar {
			return -1
		}
		return r
	}, text)
	return strings.ToValidUTF8(text[:min(len(text), wordBytesMax)], "")
}
