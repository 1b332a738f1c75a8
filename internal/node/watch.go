package node

import (
	"context"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// watchQuiet is the time without a change after which a file is read: an editor's save is several events.
const watchQuiet = 300 * time.Millisecond

// watchFile reports changes of the file, or of a file in the folder, since it was called, until ctx ends. It
// watches the folder, because editors and configuration tools replace files by renaming.
func watchFile(ctx context.Context, path string, log *slog.Logger) <-chan struct{} {
	changed := make(chan struct{}, 1)
	watcher, err := fsnotify.NewWatcher()
	if err == nil {
		err = watcher.Add(filepath.Dir(path))
		if err == nil {
			_ = watcher.Add(path) // a folder of files; for a file this changes nothing
		}
	}
	if err != nil {
		log.Error("cannot watch the file for changes; `shunt reload` applies them", "path", path, "error", err)
		return changed
	}
	go func() {
		defer watcher.Close() //nolint:errcheck // nothing is lost
		quiet := time.NewTimer(watchQuiet)
		quiet.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case event, ok := <-watcher.Events:
				if !ok {
					return
				}
				if filepath.Clean(event.Name) == filepath.Clean(path) || filepath.Dir(event.Name) == filepath.Clean(path) {
					quiet.Reset(watchQuiet)
				}
			case err, ok := <-watcher.Errors:
				if !ok {
					return
				}
				log.Warn("error while watching the file for changes", "path", path, "error", err)
			case <-quiet.C:
				select {
				case changed <- struct{}{}:
				default:
				}
			}
		}
	}()
	return changed
}
