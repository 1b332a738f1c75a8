// Package plane runs a control plane of Kubernetes for tests, as processes.
//
//	Run ─┬─ etcd                       DIR/etcd, gone with DIR
//	     ├─ kube-apiserver             client certificates
//	     ├─ kube-controller-manager
//	     └─ kube-scheduler             only with nodes
//
// Without nodes there is no kubelet: the apiserver is on loopback, and of the controllers there is
// endpointslice-controller alone. With nodes it is at an address that they reach, with all controllers.
//
// All files are in one folder; the processes end with the one that runs this package, however it ends. In a
// network namespace without nodes it needs loopback only.
package plane

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
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
	Folder string // exists; for all files of the components
	// ServiceRange is the range of cluster IPs, one prefix or two of both families, with a comma.
	ServiceRange string
	// Address is the apiserver's address for nodes, one of this network namespace's. It is not used without
	// nodes.
	Address netip.Addr
	Nodes   []Node
}

// Node is a node that may join. The folder then has NAME.kubeconfig for its kubelet, and NAME.crt and NAME.key
// for the kubelet's own server.
type Node struct {
	Name      string
	Addresses []netip.Addr
}

// Port is the apiserver's port if there are nodes.
const Port = "6443"

// Kubeconfig is the file, in the folder, that gives its reader all rights.
const Kubeconfig = "admin.kubeconfig"

// readyTimeout bounds the start, which takes 3 s on an idle machine.
const readyTimeout = 2 * time.Minute

// Run starts the components, calls ready once the apiserver serves, and stops them when ctx ends. If one ends by
// itself, Run returns an error with the end of its log.
func Run(ctx context.Context, o Options, ready func()) error {
	// The kernel ends the children when this thread ends, not the process (prctl(2), PR_SET_PDEATHSIG).
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ports, err := freePorts(5)
	if err != nil {
		return err
	}
	server := "127.0.0.1:" + ports[2]
	if len(o.Nodes) > 0 {
		server = net.JoinHostPort(o.Address.String(), Port)
	}
	server = "https://" + server
	keys, err := o.writeKeys(server)
	if err != nil {
		return err
	}
	r := &runner{options: o, ended: make(chan error, 4)}
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

// components are the components' command lines, in the order of their start.
func (o Options) components(ports []string) [][]string {
	etcd, peer := "http://127.0.0.1:"+ports[0], "http://127.0.0.1:"+ports[1]
	all := [][]string{
		{"etcd", "--name", "d", "--data-dir", o.in("etcd"), "--listen-client-urls", etcd, "--advertise-client-urls", etcd,
			"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "d=" + peer,
			"--unsafe-no-fsync", "--logger", "zap", "--log-level", "warn"},
		append([]string{"kube-apiserver", "--etcd-servers=" + etcd,
			"--tls-cert-file=" + o.in("apiserver.crt"), "--tls-private-key-file=" + o.in("apiserver.key"), "--client-ca-file=" + o.in("ca.crt"),
			"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + o.in("accounts.key"),
			"--service-account-signing-key-file=" + o.in("accounts.key"), "--service-cluster-ip-range=" + o.ServiceRange,
			"--anonymous-auth=false", "--profiling=false", "--shutdown-delay-duration=0"}, o.apiserver(ports[2])...),
		append([]string{"kube-controller-manager", "--leader-elect=false", "--bind-address=127.0.0.1", "--secure-port=" + ports[3]}, o.controllers()...),
	}
	if len(o.Nodes) > 0 {
		all = append(all, append([]string{"kube-scheduler", "--leader-elect=false", "--bind-address=127.0.0.1", "--secure-port=" + ports[4]}, o.asAdmin()...))
	}
	return all
}

func (o Options) in(name string) string { return filepath.Join(o.Folder, name) }

// asAdmin makes a component use the administrator's rights, for its own work and to check its clients' rights.
func (o Options) asAdmin() []string {
	admin := o.in(Kubeconfig)
	return []string{"--kubeconfig=" + admin, "--authentication-kubeconfig=" + admin, "--authorization-kubeconfig=" + admin}
}

// apiserver is the apiserver's command line with nodes, or without.
func (o Options) apiserver(port string) []string {
	if len(o.Nodes) == 0 {
		return []string{"--bind-address=127.0.0.1", "--secure-port=" + port, "--authorization-mode=RBAC",
			// Without a default route it finds no address by itself; nothing uses this one (RFC 5737).
			"--advertise-address=192.0.2.250", "--endpoint-reconciler-type=none",
			"--disable-admission-plugins=ServiceAccount"} // nothing here makes the accounts that it demands
	}
	return []string{"--bind-address=" + o.Address.String(), "--secure-port=" + Port, "--advertise-address=" + o.Address.String(),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
		"--kubelet-client-certificate=" + o.in("admin.crt"), "--kubelet-client-key=" + o.in("admin.key"),
		"--kubelet-certificate-authority=" + o.in("ca.crt"), "--kubelet-preferred-address-types=InternalIP"}
}

// controllers is the command line of kube-controller-manager.
func (o Options) controllers() []string {
	if len(o.Nodes) == 0 {
		return append(o.asAdmin(), "--controllers=endpointslice-controller")
	}
	return append(o.asAdmin(), "--use-service-account-credentials=true", "--root-ca-file="+o.in("ca.crt"),
		"--service-account-private-key-file="+o.in("accounts.key"))
}

// freePorts returns ports of loopback that are free now.
func freePorts(count int) (ports []string, err error) {
	for range count {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, fmt.Errorf("find a free port on loopback: %w: is lo up?", err)
		}
		defer l.Close() // held until all are found, or one would be found twice
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

// tail is the end of a component's log.
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

// stop kills the processes: their state is not needed any more, and an apiserver that gets SIGTERM waits for its
// clients' watches.
func (r *runner) stop() {
	for _, p := range r.running {
		_ = p.Process.Kill() // fails only if it has ended
		<-p.done
	}
}

// trusting is the TLS configuration of a client of the apiserver.
func trusting(authority *x509.Certificate, own tls.Certificate) *tls.Config {
	pool := x509.NewCertPool()
	pool.AddCert(authority)
	return &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{own}, MinVersion: tls.VersionTLS13}
}
