// Package fanotify reads the kernel's events about files, and answers those for which an opener waits (fanotify(7)).
package fanotify
