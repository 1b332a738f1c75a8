package cluster

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"
)

func TestUp(t *testing.T) {
	begin := time.Now()
	file := File
	if os.Getenv("XDP") != "" {
		file = strings.Replace(file, "name: eth0, attach: tc", "name: eth0, attach: native", 1)
	}
	c, err := Up(t.Context(), Options{Kube: os.Getenv("SHUNT_KUBE"), Programs: os.Getenv("SHUNT_KUBE_PROGRAMS")})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("up after %s: %s %s", time.Since(begin), c.ID(), c.Folder)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	err = c.StartAgents(ctx, file)
	t.Logf("agents after %s: %v", time.Since(begin), err)
	pods, err := c.Serve(ctx, "web", false)
	t.Logf("web after %s: %v", time.Since(begin), err)
	for _, p := range pods {
		t.Log(p.Name, p.Spec.NodeName, p.Status.PodIPs)
	}
	_, err = c.Serve(ctx, "host", true)
	t.Logf("host after %s: %v", time.Since(begin), err)
	err = c.AwaitAgents(ctx)
	t.Logf("in step after %s: %v", time.Since(begin), err)
	if os.Getenv("STAY") != "" {
		for os.Getenv("STAY") != "" {
			if _, err := os.Stat("/tmp/stay"); err != nil {
				break
			}
			time.Sleep(time.Second)
		}
	}
	if err := c.Down(); err != nil {
		t.Fatal(err)
	}
	t.Logf("down after %s", time.Since(begin))
}
