package sockets

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Check is the test of one feature of connections with paired sockets on this kernel.
type Check struct {
	Name string `json:"name"`
	// Must reports whether every program needs the feature. Otherwise pairs suit programs that do not use it.
	Must bool `json:"must"`
	// Broken is the fault; empty: none.
	Broken string `json:"broken,omitempty"`
}

// check is a Check before it runs.
type check struct {
	name string
	must bool
	run  func(*pair) (broken string, err error)
}

var checks = []check{
	{"carry", true, testCarry},
	{"order", true, testOrder},
	{"bound", true, testBound},
	{"leave", true, testLeave},
	{"blocking", false, testBlocking},
	{"fionread", false, testFIONREAD},
	{"splice", false, testSplice},
	{"oob", false, testOOB},
	{"zerocopy", false, testZerocopy},
	{"waitall", false, testWaitall},
	{"reset", false, testReset},
	{"half_close", false, testHalfClose},
	{"ktls", false, testKTLS},
}

// Waivable returns the names of checks that programs may do without.
func Waivable() (names []string) {
	for _, c := range checks {
		if !c.must {
			names = append(names, c.name)
		}
	}
	return names
}

// Test tests paired sockets on this kernel, with connections of its own over the loopback interface of the calling
// thread's network namespace, and a map of its own. err is the reason why it could not test.
func Test() (all []Check, err error) {
	s, err := load(Options{Limit: LimitMin})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	for i, c := range checks {
		broken, err := c.try(s, uint32(i))
		if err != nil {
			return all, fmt.Errorf("try %s with a pair of sockets: %w", c.name, err)
		}
		all = append(all, Check{c.name, c.must, broken})
	}
	return all, nil
}

func (c *check) try(s *Sockets, number uint32) (broken string, err error) {
	p, err := newPair(s, number)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	if c.name != "order" { // order puts the pair into the map later
		if err := p.join(); err != nil {
			return "", err
		}
	}
	return c.run(p)
}

// Bad returns the failed checks that names do not waive.
func Bad(all []Check, waived []string) (bad []Check) {
	for _, c := range all {
		if c.Broken != "" && (c.Must || !slices.Contains(waived, c.Name)) {
			bad = append(bad, c)
		}
	}
	return bad
}

// testCarry: messages arrive, both ways, and not by TCP.
func testCarry(p *pair) (string, error) {
	before, err := p.took()
	if err != nil {
		return "", err
	}
	const message = "back and forth"
	for range 2 {
		if err := p.send(message); err != nil {
			return fmt.Sprintf("sending fails: %v", err), nil
		}
		if text, err := p.read(len(message)); text != message {
			return fmt.Sprintf("%q was sent, %q arrived (%v)", message, text, err), nil
		}
		p.a, p.b = p.b, p.a
	}
	after, err := p.took()
	if err == nil && after != before+2 {
		return fmt.Sprintf("2 messages were sent, %d were redirected", after-before), nil
	}
	return "", err
}

// testOrder: unread data that came by TCP is read before data that is sent afterwards.
func testOrder(p *pair) (string, error) {
	if err := p.send("1"); err != nil {
		return "", err
	}
	if err := p.join(); err != nil {
		return "", err
	}
	for _, one := range []string{"2", "3"} {
		if err := p.send(one); err != nil {
			return fmt.Sprintf("sending fails: %v", err), nil
		}
	}
	if text, err := p.read(3); text != "123" {
		return fmt.Sprintf("%q was sent, %q arrived (%v)", "123", text, err), nil
	}
	before, err := p.took()
	if err != nil {
		return "", err
	}
	if err := p.send("4"); err != nil {
		return fmt.Sprintf("sending fails: %v", err), nil
	}
	after, err := p.took()
	if err == nil && after != before+1 {
		return "nothing is redirected after all was read", nil
	}
	return "", err
}

// testBound: a reader that does not read stops the sender, and no data is lost.
func testBound(p *pair) (string, error) {
	const enough = 64 << 20 // far above the limit and the buffers of TCP
	block := make([]byte, 16<<10)
	sent := 0
	for sent < enough {
		for i := range block {
			block[i] = byte((sent + i) % 251)
		}
		n, err := unix.SendmsgN(p.a, block, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		if errors.Is(err, unix.EAGAIN) {
			break
		}
		if err != nil {
			return fmt.Sprintf("sending to a slow reader fails: %v", err), nil
		}
		sent += n
	}
	if sent >= enough {
		return fmt.Sprintf("%d MiB are accepted for a reader that does not read", enough>>20), nil
	}
	seen, err := p.s.seen()
	if err != nil {
		return "", err
	}
	waits := false
	for _, one := range seen {
		waits = waits || one.Queued > 0
	}
	if !waits {
		return "the program sees no queue where one is", nil
	}
	text, err := p.read(sent)
	if err != nil || len(text) != sent {
		return fmt.Sprintf("%d bytes were sent, %d arrived (%v)", sent, len(text), err), nil
	}
	for i := range sent {
		if text[i] != byte(i%251) {
			return fmt.Sprintf("byte %d of %d is wrong", i, sent), nil
		}
	}
	if !ready(p.a, unix.POLLOUT) {
		return "the sender gets no event that it may send again", nil
	}
	return "", nil
}

// testLeave: a pair is taken apart in the middle of data, and goes on by TCP.
func testLeave(p *pair) (string, error) {
	if err := p.send("queued, "); err != nil {
		return fmt.Sprintf("sending fails: %v", err), nil
	}
	maps := p.s.coll.Maps
	for _, one := range []string{"passed, ", "outside"} {
		err := p.byTCP(func() error { return p.send(one) })
		if err != nil {
			return fmt.Sprintf("sending by TCP fails: %v", err), nil
		}
		if one == "passed, " {
			if text, err := p.read(16); text != "queued, passed, " {
				return fmt.Sprintf("%q was sent, %q arrived (%v)", "queued, passed, ", text, err), nil
			}
			for _, key := range p.keys {
				if err := maps[socketsMapShSoSocks].Delete(key); err != nil {
					return "", fmt.Errorf("remove a socket from the map: %w", err)
				}
			}
		}
	}
	if text, err := p.read(7); text != "outside" {
		return fmt.Sprintf("%q was sent, %q arrived (%v)", "outside", text, err), nil
	}
	return "", nil
}

// ready reports whether a socket gets an event before patience ends.
func ready(fd int, event int16) bool {
	return waits(fd, event, callPatience)
}

func waits(fd int, event int16, patience time.Duration) bool {
	polled := []unix.PollFd{{Fd: int32(fd), Events: event}}
	for end := time.Now().Add(patience); ; {
		n, err := unix.Poll(polled, int(max(time.Until(end), 0).Milliseconds()))
		if !errors.Is(err, unix.EINTR) {
			return n == 1 && polled[0].Revents&event != 0
		}
	}
}

// testBlocking: recv(2) of a blocking socket waits for data, also when something else wakes it.
func testBlocking(p *pair) (broken string, err error) {
	fill := make([]byte, 64<<10)
	p.a, p.b = p.b, p.a
	// Data is sent by TCP until nothing fits; then the kernel wakes this end when there is room again.
	full := 0
	err = p.byTCP(func() error {
		for {
			n, err := unix.SendmsgN(p.a, fill, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			if errors.Is(err, unix.EAGAIN) {
				return nil
			}
			if err != nil {
				return err
			}
			full += n
		}
	})
	if err != nil {
		return "", err
	}
	thread, ended := make(chan int, 1), make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		thread <- unix.Gettid()
		begin := time.Now()
		_, err := unix.Read(p.a, make([]byte, 1))
		if errors.Is(err, unix.EAGAIN) && time.Since(begin) < callPatience*9/10 {
			err = errWoken
		}
		ended <- err
	}()
	awaitSleep(<-thread)
	if text, err := p.read(full); err != nil || len(text) != full {
		return "", fmt.Errorf("read what was sent by TCP: %d of %d bytes, %w", len(text), full, err)
	}
	if err := <-ended; errors.Is(err, errWoken) {
		return "recv(2) of a blocking socket fails with EAGAIN before its timeout when something other than data wakes it", nil
	}
	return "", nil
}

// errWoken is the error of a call that has returned before its time.
var errWoken = errors.New("woken without data")

// awaitSleep waits until a thread of this process sleeps, or until it can be assumed to.
func awaitSleep(thread int) {
	for end := time.Now().Add(callPatience / 4); time.Now().Before(end); time.Sleep(time.Millisecond) {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/syscall", thread))
		if number, _, _ := strings.Cut(string(text), " "); number == strconv.Itoa(unix.SYS_READ) {
			return
		}
	}
}

// testFIONREAD: the length of readable data is reported, of redirected data and of data that came by TCP.
func testFIONREAD(p *pair) (string, error) {
	var broken []string
	for _, how := range []string{"redirected data", "data that went by TCP"} {
		send := func() error { return p.send("12345") }
		err := send
		if how != "redirected data" {
			err = func() error { return p.byTCP(send) }
		}
		if err := err(); err != nil {
			return "", err
		}
		if !ready(p.b, unix.POLLIN) {
			return "poll does not tell of " + how, nil
		}
		n, ioctlErr := unix.IoctlGetInt(p.b, unix.TIOCINQ)
		if ioctlErr != nil || n != 5 {
			broken = append(broken, fmt.Sprintf("it says %d of 5 bytes of %s", n, how))
		}
		if _, err := p.read(5); err != nil {
			return "", err
		}
	}
	return strings.Join(broken, ", "), nil
}

// testSplice: data goes from a socket into a pipe, as Go's io.Copy moves it between two sockets.
func testSplice(p *pair) (string, error) {
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		return "", err
	}
	defer unix.Close(pipe[0])                                      //nolint:errcheck // they are not needed any more
	defer unix.Close(pipe[1])                                      //nolint:errcheck
	brief := unix.NsecToTimeval((callPatience / 10).Nanoseconds()) // the socket's own time limit holds in spite of SPLICE_F_NONBLOCK
	if err := errors.Join(unix.SetsockoptTimeval(p.b, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &brief), p.send("12345")); err != nil {
		return "", err
	}
	n, err := unix.Splice(p.b, nil, pipe[1], nil, 5, unix.SPLICE_F_NONBLOCK)
	if n != 5 {
		return fmt.Sprintf("splice(2) from a socket moves %d of 5 bytes (%v)", max(n, 0), err), nil
	}
	return "", nil
}

// testOOB: POLLPRI announces urgent data, which is not among the other data.
func testOOB(p *pair) (string, error) {
	if _, err := unix.SendmsgN(p.a, []byte("!"), nil, nil, unix.MSG_OOB|unix.MSG_NOSIGNAL); err != nil {
		return fmt.Sprintf("sending urgent data fails: %v", err), nil
	}
	if !ready(p.b, unix.POLLPRI|unix.POLLIN) || !waits(p.b, unix.POLLPRI, 0) {
		return "urgent data arrive as ordinary data", nil
	}
	return "", nil
}

// testZerocopy: the sender is told when it may use its buffer again.
func testZerocopy(p *pair) (string, error) {
	if err := unix.SetsockoptInt(p.a, unix.SOL_SOCKET, unix.SO_ZEROCOPY, 1); err != nil {
		return "", err
	}
	if _, err := unix.SendmsgN(p.a, make([]byte, 20_000), nil, nil, unix.MSG_ZEROCOPY|unix.MSG_NOSIGNAL); err != nil {
		return fmt.Sprintf("sending with MSG_ZEROCOPY fails: %v", err), nil
	}
	if _, err := p.read(20_000); err != nil {
		return "", err
	}
	if !waits(p.a, unix.POLLERR, callPatience/10) {
		return "no completion comes", nil
	}
	return "", nil
}

// testWaitall: recv(2) with MSG_WAITALL waits for all bytes that it was asked for, or until the socket's time limit.
func testWaitall(p *pair) (string, error) {
	const wait = 100 * time.Millisecond
	limit := unix.NsecToTimeval(wait.Nanoseconds())
	if err := unix.SetsockoptTimeval(p.b, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		return "", err
	}
	for range 3 { // a machine that is slow once must not look like a call that waited
		if err := p.send("1"); err != nil {
			return "", err
		}
		begin := time.Now()
		n, _, err := unix.Recvfrom(p.b, make([]byte, 2), unix.MSG_WAITALL)
		if err != nil {
			return "", err
		}
		if took := time.Since(begin); took < wait*9/10 {
			return fmt.Sprintf("it returns %d of 2 bytes at once", n), nil
		}
	}
	return "", nil
}

// testReset: an end that closes with unread data resets the connection.
func testReset(p *pair) (string, error) {
	if err := p.send("unread"); err != nil {
		return "", err
	}
	err := unix.Close(p.b)
	p.b = -1
	if err != nil {
		return "", err
	}
	if _, err := unix.Read(p.a, make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		return fmt.Sprintf("the other end sees an end of file in place of a reset (%v)", err), nil
	}
	return "", nil
}

// testHalfClose: data that waits at an end that has finished sending is still there after the other end has closed.
func testHalfClose(p *pair) (string, error) {
	if err := p.send("an answer"); err != nil {
		return "", err
	}
	if err := unix.Shutdown(p.b, unix.SHUT_WR); err != nil {
		return "", err
	}
	if n, err := unix.Read(p.a, make([]byte, 1)); n != 0 || err != nil {
		return fmt.Sprintf("the other end reads %d, %v", n, err), nil
	}
	err := unix.Close(p.a)
	p.a = -1
	if err != nil {
		return "", err
	}
	if !ready(p.b, unix.POLLIN|unix.POLLHUP) {
		return "the end of the connection is not reported", nil
	}
	for end := time.Now().Add(callPatience); state(p.b) == tcpFinWait2 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	text, err := p.read(9)
	if text != "an answer" {
		return fmt.Sprintf("%q was sent, and %q arrived after both ends had ended (%v)", "an answer", text, err), nil
	}
	if _, err := unix.Read(p.b, make([]byte, 1)); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Sprintf("the end is read as %v", err), nil
	}
	return "", nil
}

// tcpFinWait2 is TCP_FIN_WAIT2 of include/net/tcp_states.h.
const tcpFinWait2 = 5

// state returns the state of a TCP socket; 0 if it cannot be read.
func state(fd int) uint8 {
	info, err := unix.GetsockoptTCPInfo(fd, unix.SOL_TCP, unix.TCP_INFO)
	if err != nil {
		return 0
	}
	return info.State
}

// TLS_TX and TLS_RX of linux/tls.h.
const (
	tlsTX = 1
	tlsRX = 2
)

// kernelTLS gives a socket TLS 1.2 with AES GCM 128 by the kernel, for one direction. It fills struct tls12_crypto_info_aes_gcm_128 of
// linux/tls.h, with zeros for keys.
func kernelTLS(fd, direction int) error {
	keys := make([]byte, 40)
	binary.NativeEndian.PutUint16(keys, 0x0303)
	binary.NativeEndian.PutUint16(keys[2:], 51)
	// This makes the kernel load its module, as a program would.
	if err := unix.SetsockoptString(fd, unix.SOL_TCP, unix.TCP_ULP, "tls"); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("TCP_ULP: %w", err)
	}
	return os.NewSyscallError("SOL_TLS", unix.SetsockoptString(fd, unix.SOL_TLS, direction, string(keys)))
}

// hasKernelTLS reports whether a socket that is in no map can have TLS by the kernel.
func hasKernelTLS() (bool, error) {
	a, b, err := connected()
	defer func() {
		for _, fd := range []int{a, b} {
			if fd >= 0 {
				_ = unix.Close(fd) // nothing was sent
			}
		}
	}()
	if err != nil {
		return false, fmt.Errorf("connect two sockets over loopback: %w", err)
	}
	return errors.Join(kernelTLS(a, tlsTX), kernelTLS(a, tlsRX)) == nil, nil
}

// testKTLS: data that a socket with TLS by the kernel sends is encrypted, and data that it gets is decrypted, when the other end has TLS of
// its own. A kernel without TLS breaks nothing.
func testKTLS(p *pair) (string, error) {
	const secret = "secret"
	if has, err := hasKernelTLS(); err != nil || !has {
		return "", err
	}
	if err := kernelTLS(p.a, tlsTX); err != nil {
		return fmt.Sprintf("a paired socket cannot have it: %v", err), nil
	}
	if err := p.send(secret); err != nil {
		return fmt.Sprintf("sending fails: %v", err), nil
	}
	record, err := p.read(5 + 8 + len(secret) + 16) // header, nonce, tag
	if strings.Contains(record, secret) {
		return "what is sent arrives unencrypted", nil
	}
	if err != nil || !strings.HasPrefix(record, "\x17\x03\x03") {
		return fmt.Sprintf("no record of TLS arrives (%v)", err), nil
	}
	if err := kernelTLS(p.a, tlsRX); err != nil {
		return fmt.Sprintf("a paired socket cannot receive with it: %v", err), nil
	}
	p.a, p.b = p.b, p.a
	if err := p.send(record); err != nil {
		return fmt.Sprintf("sending to it fails: %v", err), nil
	}
	if text, err := p.read(len(secret)); text != secret {
		return fmt.Sprintf("what it receives is not decrypted (%v)", err), nil
	}
	return "", nil
}
