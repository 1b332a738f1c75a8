package sensor

// Process is the only process that sensors of the kinds Uprobe and Uretprobe observe.
type Process struct {
	PID int
	// Executable is the file with the symbols, for example /proc/PID/exe, for a way that names no file.
	Executable string
}
