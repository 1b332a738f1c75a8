// Package machine describes the machine of a benchmark: the facts that a reader needs to judge its
// figures.
package machine

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Machine is the description of a machine in the benchmarks' reports.
type Machine struct {
	Date     string  `json:"date"` // RFC 3339
	Kernel   string  `json:"kernel"`
	CPU      string  `json:"cpu"`
	CPUs     int     `json:"cpus"`
	MemoryGB float64 `json:"memory_gb"`
	Go       string  `json:"go"`
	Commit   string  `json:"commit"` // of this repository; "+changes" when files differ from it
	// Mitigations are the CPU's known faults with the kernel's answer to each, "spectre_v2:
	// Mitigation: Retpolines; ...", without the faults that it does not have. With some a return costs
	// several times as much, and a BPF program makes one for every helper.
	Mitigations []string `json:"mitigations,omitempty"`
}

// Describe collects the facts of this machine.
func Describe() (Machine, error) {
	m := Machine{
		Date: time.Now().UTC().Format(time.RFC3339), CPU: processor("/proc/cpuinfo"), CPUs: runtime.NumCPU(), Go: runtime.Version(),
		Mitigations: mitigations("/sys/devices/system/cpu/vulnerabilities"),
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return m, fmt.Errorf("ask for the kernel's version: %w", err)
	}
	m.Kernel = unix.ByteSliceToString(name.Release[:])
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return m, fmt.Errorf("ask for the memory's size: %w", err)
	}
	m.MemoryGB = float64(info.Totalram*uint64(info.Unit)>>20) / 1024
	if out, err := exec.Command("git", "describe", "--always", "--dirty=+changes").Output(); err == nil {
		m.Commit = strings.TrimSpace(string(out))
	}
	return m, nil
}

// String is one line, without the mitigations and the date.
func (m Machine) String() string {
	text := fmt.Sprintf("Linux %s, %d × %s, %.0f GB, %s", m.Kernel, m.CPUs, m.CPU, m.MemoryGB, m.Go)
	if m.Commit != "" {
		text += ", commit " + m.Commit
	}
	return text
}

// Faults is the mitigations as a sentence.
func (m Machine) Faults() string {
	if len(m.Mitigations) == 0 {
		return "The kernel names no fault of this CPU."
	}
	return "Faults of this CPU, and what the kernel does about them: " + strings.Join(m.Mitigations, "; ") + "."
}

// ReportName is the name of a report of this machine in a directory: <prefix><date>-<kernel>, and
// for a second one on a day with the time. Its page has ".md" behind that.
func (m Machine) ReportName(dir, prefix string) string {
	name := prefix + m.Date[:len(time.DateOnly)] + "-" + m.Kernel
	if _, err := os.Stat(filepath.Join(dir, name+".md")); err == nil {
		name = prefix + strings.NewReplacer(":", "", "Z", "").Replace(m.Date) + "-" + m.Kernel
	}
	return name
}

// Command is the command line that runs the benchmark in this folder of the repository again.
func Command(folder string) string {
	return strings.TrimSpace("go run -exec sudo ./" + folder + " " + strings.Join(os.Args[1:], " "))
}

// processor is the CPU's name in a file like /proc/cpuinfo, or "unknown CPU".
func processor(file string) string {
	const unknown = "unknown CPU"
	f, err := os.Open(file)
	if err != nil {
		return unknown
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if key, value, is := strings.Cut(lines.Text(), ":"); is && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return unknown
}

// mitigations reads a directory with a file for each fault (the kernel's
// Documentation/ABI/testing/sysfs-devices-system-cpu).
func mitigations(dir string) (all []string) {
	files, _ := filepath.Glob(filepath.Join(dir, "*")) // the only error is of the pattern
	for _, file := range files {
		text, err := os.ReadFile(file)
		if state := strings.TrimSpace(string(text)); err == nil && state != "Not affected" {
			all = append(all, filepath.Base(file)+": "+state)
		}
	}
	return all
}
