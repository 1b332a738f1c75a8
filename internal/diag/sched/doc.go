// Package sched finds out why a task waited for a CPU, and why a CPU was late.
package sched
