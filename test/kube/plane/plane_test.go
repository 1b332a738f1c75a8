package plane_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/shunt-lb/shunt/test/kube/plane"
)

// run lets a shell script stand in for all components, and returns the control plane's error.
func run(t *testing.T, ctx context.Context, script string) (folder string, err error) {
	t.Helper()
	folder = t.TempDir()
	binary := filepath.Join(folder, "kube")
	if err := os.WriteFile(binary, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	return folder, plane.Run(ctx, plane.Options{Binary: binary, Folder: folder, ServiceRange: "10.96.0.0/16"}, func() { t.Error("it is ready") })
}

func TestComponentEnds(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	folder, err := run(t, ctx, "echo $$ >> \"$(dirname \"$0\")/pids\"\n[ \"$1\" = etcd ] && exec sleep 1000\necho broken; exit 3\n")
	if err == nil || !strings.Contains(err.Error(), "kube-apiserver has ended (exit status 3)") || !strings.Contains(err.Error(), "broken") {
		t.Errorf("Run returned %v", err)
	}
	nothingRuns(t, folder)
}

func TestToldToStopBeforeItIsReady(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	folder, err := run(t, ctx, "echo $$ >> \"$(dirname \"$0\")/pids\"\nexec sleep 1000\n")
	if err == nil || !strings.Contains(err.Error(), "readyz is not well") {
		t.Errorf("Run returned %v", err)
	}
	nothingRuns(t, folder)
}

func TestNoBinary(t *testing.T) {
	err := plane.Run(context.Background(), plane.Options{Binary: "/nowhere", Folder: t.TempDir(), ServiceRange: "10.96.0.0/16"}, func() {})
	if err == nil || !strings.Contains(err.Error(), "start etcd") {
		t.Errorf("Run returned %v", err)
	}
}

// nothingRuns reports remaining processes.
func nothingRuns(t *testing.T, folder string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(folder, "pids"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // a process that was killed early has written nothing
		t.Fatal(err)
	}
	for _, pid := range strings.Fields(string(text)) {
		if _, err := os.Stat("/proc/" + pid); err == nil {
			t.Errorf("process %s still runs", pid)
		}
	}
}
