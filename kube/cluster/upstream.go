package cluster

import (
	"context"
	_ "embed"
	"encoding/xml"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/shunt-lb/shunt/internal/lab"
)

// The images that the pods of Kubernetes' own tests run, and a resolver. The first is built from the tests' sources,
// with this machine's programs beside it. Names and versions are those of the tests (test/utils/image/manifest.go
// there); the file repositories has the places where they look for images, so that no other place is asked.
const (
	testRegistry       = "shunt.test"
	agnhostImage       = testRegistry + "/agnhost:2.56"
	upstreamPauseImage = testRegistry + "/pause:3.10.1"
	resolverImage      = testRegistry + "/resolver:1"
	repositories       = "promoterE2eRegistry: " + testRegistry + "\ngcRegistry: " + testRegistry + "\n"
)

func (c *Cluster) writeUpstreamImages() error {
	agnhost, err := inRoot(filepath.Join(c.options.Upstream, "agnhost"))
	if err != nil {
		return err
	}
	if err := addWithLibraries(agnhost, "bash", "sh", "wget", "curl", "nc", "nslookup", "seq", "sleep", "cat", "dd", "ls", "date", "timeout", "grep", "hostname"); err != nil {
		return fmt.Errorf("%w: install the packages wget, curl, netcat-openbsd and bind9-dnsutils", err)
	}
	resolver, err := inRoot(filepath.Join(c.options.Upstream, "resolver"))
	if err != nil {
		return err
	}
	return errors.Join(
		writeImages(c.in("images", "agnhost.tar"), []image{{agnhostImage, []string{"/agnhost"}}}, agnhost),
		writeImages(c.in("images", "resolver.tar"), []image{{resolverImage, []string{"/resolver"}}}, resolver),
	)
}

// StartKubeProxy runs kube-proxy in mode nftables on the nodes, instead of Install. It ends with the cluster.
func (c *Cluster) StartKubeProxy() error { return c.StartKubeProxyOn("nftables", c.Nodes...) }

// StartKubeProxyOn does the same on some of the nodes, in a mode of --proxy-mode.
func (c *Cluster) StartKubeProxyOn(mode string, nodes ...*Node) error {
	for _, n := range nodes {
		process, err := c.kubeProxy(context.Background(), n, "--proxy-mode="+mode).Spawn()
		if err != nil {
			return fmt.Errorf("start kube-proxy on %s: %w", n.Name(), err)
		}
		c.proxies = append(c.proxies, proxy{process, n})
	}
	return nil
}

// proxy is a kube-proxy of a node.
type proxy struct {
	*lab.Process
	node *Node
}

// kubeProxy returns the command of kube-proxy for a node.
func (c *Cluster) kubeProxy(ctx context.Context, n *Node, more ...string) *lab.Command {
	return n.Command(ctx, c.options.Kube, append([]string{"kube-proxy", "--proxy-mode=nftables", "--kubeconfig=" + c.Kubeconfig(), "--hostname-override=" + n.Name(),
		// These settings belong to the machine.
		"--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0"}, more...)...)
}

// StopKubeProxy ends the kube-proxies of StartKubeProxy. Their rules stay.
func (c *Cluster) StopKubeProxy() error {
	var failures []error
	for _, proxy := range c.proxies {
		err := proxy.End(syscall.SIGTERM, Patience)
		var ended *exec.ExitError // it has no handler for the signal
		if errors.As(err, &ended) && ended.Sys().(syscall.WaitStatus).Signal() == syscall.SIGTERM {
			continue
		}
		if err != nil {
			failures = append(failures, fmt.Errorf("stop kube-proxy on %s: %w", proxy.node.Name(), err))
		}
	}
	c.proxies = nil
	return errors.Join(failures...)
}

// CleanKubeProxy removes kube-proxy's rules, as users do: `kube-proxy --cleanup`.
func (c *Cluster) CleanKubeProxy(ctx context.Context) error {
	for _, n := range c.Nodes {
		if output, err := c.kubeProxy(ctx, n, "--cleanup").CombinedOutput(); err != nil {
			return fmt.Errorf("kube-proxy --cleanup on %s: %w:\n%s", n.Name(), err, output)
		}
	}
	return nil
}

// CheckKubeProxy returns an error if a kube-proxy has ended on its own.
func (c *Cluster) CheckKubeProxy() error {
	for _, proxy := range c.proxies {
		select {
		case <-proxy.Ended:
			return fmt.Errorf("kube-proxy on %s has ended (%v):\n%s", proxy.node.Name(), proxy.Err(), proxy.Log())
		default:
		}
	}
	return nil
}

//go:embed resolver.yaml
var resolver string

// StartResolver resolves names for pods, and waits until it answers on all nodes. It asks the apiserver by its Service.
func (c *Cluster) StartResolver(ctx context.Context) error {
	command := c.Plane.Command(ctx, filepath.Join(c.options.Upstream, "kubectl"), "--kubeconfig", c.Kubeconfig(), "apply", "-f", "-")
	command.Stdin = strings.NewReader(strings.ReplaceAll(resolver, "IMAGE", resolverImage))
	if output, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("make the resolver: kubectl apply: %w:\n%s", err, output)
	}
	return c.awaitDaemons(ctx, Namespace, "resolver")
}

// Spec is one of Kubernetes' own tests, and its result.
type Spec struct {
	Name    string  `xml:"name,attr"`
	Status  string  `xml:"status,attr"` // "passed", "failed", "skipped", "timedout", "panicked", "interrupted" (Ginkgo's types.SpecState)
	Seconds float64 `xml:"time,attr"`
	Failure struct {
		Message string `xml:"message,attr"`
	} `xml:"failure"`
	Skipped struct {
		Message string `xml:"message,attr"` // "skipped" if it was not asked for, otherwise "skipped - " and the reason why it cannot run here
	} `xml:"skipped"`
}

// Test runs Kubernetes' own tests whose names match focus and not skip, one after the other, and returns all tests of
// the program. Their order is always the same. A failed test is no error. Their output goes to a file.
func (c *Cluster) Test(ctx context.Context, focus, skip, log string) ([]Spec, error) {
	file, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	images, report := c.in("repositories.yaml"), c.in("report.xml")
	if err := os.WriteFile(images, []byte(repositories), 0o600); err != nil {
		return nil, err
	}
	command := c.Plane.Command(ctx, filepath.Join(c.options.Upstream, "e2e.test"), "--kubeconfig="+c.Kubeconfig(), "--provider=skeleton", "--kubectl-path="+filepath.Join(c.options.Upstream, "kubectl"),
		fmt.Sprintf("--num-nodes=%d", len(c.Nodes)), "--ginkgo.v", "--ginkgo.no-color", "--ginkgo.focus="+focus, "--ginkgo.skip="+skip,
		"--ginkgo.timeout=3h", "--ginkgo.seed=1", "--ginkgo.junit-report="+report)
	command.Stdout, command.Stderr, command.Dir = file, file, c.Folder
	command.Env = append(command.Environ(), "KUBE_TEST_REPO_LIST="+images)
	command.Cancel = func() error { return command.Process.Signal(syscall.SIGINT) } // it removes its objects, and writes the report
	command.WaitDelay = time.Minute
	failed := command.Run()
	text, err := os.ReadFile(report)
	if err != nil {
		return nil, fmt.Errorf("run Kubernetes' tests: they have written no report: %w: see %s", errors.Join(failed, err), log)
	}
	specs, err := readReport(text)
	return specs, errors.Join(err, c.CheckKubeProxy())
}

// readReport reads a report in the form of JUnit, as Ginkgo writes it (reporters/junit_report.go there).
func readReport(text []byte) ([]Spec, error) {
	var report struct {
		Specs []Spec `xml:"testsuite>testcase"`
	}
	if err := xml.Unmarshal(text, &report); err != nil {
		return nil, fmt.Errorf("read the report of Kubernetes' tests: %w", err)
	}
	var specs []Spec
	for _, s := range report.Specs {
		if name, is := strings.CutPrefix(s.Name, "[It] "); is { // the others run before and after all tests
			s.Name, _, _ = strings.Cut(name, " [sig-network") // without its labels
			specs = append(specs, s)
		}
	}
	return specs, nil
}
