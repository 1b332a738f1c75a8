package tool

import (
	"fmt"
	"os"

	"gopkg.in/natefinch/lumberjack.v2"
)

// OpenRotated opens a log that is renamed after so many MiB; backups is the number of renamed logs to keep, 0:
// all. A file that cannot be written to is refused at once.
func OpenRotated(path string, mode os.FileMode, sizeMiB, backups int) (*lumberjack.Logger, error) {
	file, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, mode)
	if err == nil {
		err = file.Close()
	}
	if err != nil {
		return nil, fmt.Errorf("open the log: %w", err)
	}
	return &lumberjack.Logger{Filename: path, MaxSize: sizeMiB, MaxBackups: backups}, nil
}
