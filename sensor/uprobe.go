package sensor

// Process is the process that sensors of the kinds Uprobe and Uretprobe observe, and nothing of others.
type Process struct {
	PID int
	// Executable is the file with the symbols, for example /proc/PID/exe, where a way names none.
	Executable string
}
