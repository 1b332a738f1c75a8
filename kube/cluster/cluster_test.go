package cluster

import (
	"os"
	"testing"
	"time"
)

func TestUp(t *testing.T) {
	begin := time.Now()
	c, err := Up(t.Context(), Options{Kube: os.Getenv("SHUNT_KUBE"), Programs: os.Getenv("SHUNT_KUBE_PROGRAMS")})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("up after %s: %s %s", time.Since(begin), c.ID(), c.Folder)
	if os.Getenv("STAY") != "" {
		time.Sleep(10 * time.Minute)
	}
	if err := c.Down(); err != nil {
		t.Fatal(err)
	}
	t.Logf("down after %s", time.Since(begin))
}
