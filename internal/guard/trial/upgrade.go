package trial

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// unpack makes the file beside a program that is to take its place, as dpkg does.
func unpack(path string) error {
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	fd, err := unix.Open(path+".dpkg-new", unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	file := os.NewFile(uintptr(fd), path)
	_, err = file.Write(self)
	return errors.Join(err, file.Chown(0, 0), file.Chmod(0o755), file.Sync(), file.Close())
}

// install puts the new file in the program's place, with the old one beside it until that has worked, as dpkg does.
func install(path string) error {
	_ = os.Remove(path + ".dpkg-tmp")
	return errors.Join(os.Link(path, path+".dpkg-tmp"), os.Rename(path+".dpkg-new", path), os.Remove(path+".dpkg-tmp"))
}

// upgrades are the ways of package managers and others with a program.
var upgrades = []Row{
	{Name: "upgrade", attempt: func(w *work) error { return errors.Join(unpack(w.dir), install(w.dir)) }},
	{Name: "unpack", attempt: func(w *work) error { return unpack(w.dir) }},
	{Name: "install", attempt: func(w *work) error { return install(w.dir) }},
	{Name: "unpack-before-install", before: func(w *work) error { return unpack(w.dir) }, attempt: func(w *work) error { return install(w.dir) }},
	{Name: "truncate-path", attempt: func(w *work) error { return unix.Truncate(w.dir, 1<<20) }},
}
