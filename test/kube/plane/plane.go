// Package plane runs a control plane of Kubernetes for tests: etcd, kube-apiserver and
// kube-controller-manager, as processes on loopback, without a kubelet.
//
//	Run ─┬─ etcd                       DIR/etcd, gone with DIR
//	     ├─ kube-apiserver             127.0.0.1, client certificates
//	     └─ kube-controller-manager    endpointslice-controller alone
//
// All files are in one folder; the processes end with the one that runs this, however that ends. In a
// network namespace it needs loopback only.
package plane

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"time"
)

// Options of a control plane.
type Options struct {
	Binary string // of the components, as `kube COMPONENT FLAGS`
	Folder string // exists; for everything that they write
	// ServiceRange is where cluster IPs are from, one prefix or two of both families, with a comma.
	ServiceRange string
}

// Kubeconfig is the file, in the folder, that lets its reader do everything.
const Kubeconfig = "admin.kubeconfig"

// readyTimeout: it takes 3 s on a machine that does nothing else.
const readyTimeout = 2 * time.Minute

// Run starts the components, calls ready once the apiserver serves, and stops them when ctx ends. If
// one ends by itself, that is the error, with what it wrote last.
func Run(ctx context.Context, o Options, ready func()) error {
	// The kernel ends the children when this thread ends, not the process (prctl(2), PR_SET_PDEATHSIG).
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ports, err := freePorts(4)
	if err != nil {
		return err
	}
	server := "https://127.0.0.1:" + ports[2]
	keys, err := writeKeys(o.Folder, server)
	if err != nil {
		return err
	}
	r := &runner{options: o, ended: make(chan error, 3)}
	defer r.stop()
	for _, component := range o.components(ports) {
		if err := r.start(component[0], component[1:]...); err != nil {
			return err
		}
		if component[0] == "kube-apiserver" {
			if err := r.await(ctx, keys, server+"/readyz"); err != nil {
				return err
			}
		}
	}
	ready()
	select {
	case <-ctx.Done():
		return nil
	case err := <-r.ended:
		return err
	}
}

// components are their command lines, in the order of their start.
func (o Options) components(ports []string) [][]string {
	in := func(name string) string { return filepath.Join(o.Folder, name) }
	etcd, peer := "http://127.0.0.1:"+ports[0], "http://127.0.0.1:"+ports[1]
	return [][]string{
		{"etcd", "--name", "d", "--data-dir", in("etcd"), "--listen-client-urls", etcd, "--advertise-client-urls", etcd,
			"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "d=" + peer,
			"--unsafe-no-fsync", "--logger", "zap", "--log-level", "warn"},
		{"kube-apiserver", "--etcd-servers=" + etcd, "--bind-address=127.0.0.1", "--secure-port=" + ports[2],
			// Without a default route it finds no address by itself; nothing uses this one (RFC 5737).
			"--advertise-address=192.0.2.250", "--endpoint-reconciler-type=none",
			"--tls-cert-file=" + in("apiserver.crt"), "--tls-private-key-file=" + in("apiserver.key"), "--client-ca-file=" + in("ca.crt"),
			"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + in("accounts.key"),
			"--service-account-signing-key-file=" + in("accounts.key"),
			"--service-cluster-ip-range=" + o.ServiceRange, "--authorization-mode=RBAC",
			"--disable-admission-plugins=ServiceAccount", // nothing here makes the accounts that it asks for
			"--anonymous-auth=false", "--profiling=false", "--shutdown-delay-duration=0"},
		{"kube-controller-manager", "--kubeconfig=" + in(Kubeconfig), "--authentication-kubeconfig=" + in(Kubeconfig),
			"--authorization-kubeconfig=" + in(Kubeconfig), "--leader-elect=false", "--controllers=endpointslice-controller",
			"--bind-address=127.0.0.1", "--secure-port=" + ports[3]},
	}
}

// freePorts are ports of loopback that nobody has now.
func freePorts(count int) (ports []string, err error) {
	for range count {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("find a free port on loopback: %w: is lo up?", err)
		}
		defer l.Close() // until all are found, or one would be found twice
		ports = append(ports, strconv.Itoa(l.Addr().(*net.TCPAddr).Port))
	}
	return ports, nil
}

// runner holds the processes of a control plane.
type runner struct {
	options Options
	running []*process
	ended   chan error // one for each that has ended
}

type process struct {
	*exec.Cmd
	name string
	done chan struct{}
}

func (r *runner) start(name string, flags ...string) error {
	log, err := os.Create(r.log(name))
	if err != nil {
		return err
	}
	defer log.Close()
	p := &process{exec.Command(r.options.Binary, append([]string{name}, flags...)...), name, make(chan struct{})}
	p.Stdout, p.Stderr = log, log
	p.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.Start(); err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	r.running = append(r.running, p)
	go func() {
		err := p.Wait()
		close(p.done)
		r.ended <- fmt.Errorf("%s has ended (%v); its log ends with:\n%s", name, err, r.tail(name))
	}()
	return nil
}

func (r *runner) log(name string) string { return filepath.Join(r.options.Folder, name+".log") }

// tail is the last of what a component has written.
func (r *runner) tail(name string) string {
	text, err := os.ReadFile(r.log(name))
	if err != nil {
		return err.Error()
	}
	const most = 4000
	return string(text[max(0, len(text)-most):])
}

// await returns once a GET of the address is answered with 200.
func (r *runner) await(ctx context.Context, keys *tls.Config, address string) error {
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: keys}, Timeout: 5 * time.Second}
	defer client.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	last := "it was not asked yet"
	for {
		select {
		case err := <-r.ended:
			return err
		case <-ctx.Done():
			return fmt.Errorf("%s is not well (%w): %s; the log of kube-apiserver ends with:\n%s", address, ctx.Err(), last, r.tail("kube-apiserver"))
		case <-tick.C:
		}
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
		if err != nil {
			return err
		}
		answer, err := client.Do(request)
		if err != nil {
			last = err.Error()
			continue
		}
		_, _ = io.Copy(io.Discard, answer.Body)
		answer.Body.Close()
		if answer.StatusCode == http.StatusOK {
			return nil
		}
		last = answer.Status
	}
}

// stop kills the processes: nobody needs what they have any more, and an apiserver that is told to end
// waits for its clients' watches.
func (r *runner) stop() {
	for _, p := range r.running {
		_ = p.Process.Kill() // fails only where it has ended
		<-p.done
	}
}

// trusting is the TLS configuration of a client of the apiserver.
func trusting(authority *x509.Certificate, own tls.Certificate) *tls.Config {
	pool := x509.NewCertPool()
	pool.AddCert(authority)
	return &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{own}, MinVersion: tls.VersionTLS13}
}
