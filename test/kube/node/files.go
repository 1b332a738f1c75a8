package node

import (
	"encoding/json"
	"fmt"
	"os"
)

// plugins is the folder of Debian's CNI plugins.
const plugins = "/usr/lib/cni"

// PauseImage is the image of the container that holds a pod's namespaces. It must be among the images.
const PauseImage = "shunt.test/pause:1"

// writeFiles writes the configuration of containerd, CNI and the kubelet.
func (o Options) writeFiles() error {
	network, err := o.network()
	if err != nil {
		return err
	}
	for name, text := range map[string]string{"containerd.toml": o.containerd(), "kubelet.yaml": o.kubelet(), "cni/10-pods.conflist": network, runscFile: o.runsc()} {
		if err := os.MkdirAll(o.in("cni"), 0o755); err != nil {
			return err
		}
		mode := os.FileMode(0o644)
		if name == runscFile {
			mode = 0o755
		}
		if err := os.WriteFile(o.in(name), []byte(text), mode); err != nil {
			return err
		}
	}
	return nil
}

// containerd is containerd's configuration. Processes get no score that needs CAP_SYS_RESOURCE, which a container that
// is itself a machine lacks.
func (o Options) containerd() string {
	return fmt.Sprintf(`version = 2
oom_score = 0
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = %q
restrict_oom_score_adj = true
disable_apparmor = true
disable_hugetlb_controller = true
tolerate_missing_hugetlb_controller = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = %q
conf_dir = %q

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
`, PauseImage, plugins, o.in("cni")) + o.sandboxes()
}

// runscFile is a program that runs gVisor's runsc. The node's cgroups are of both hierarchies, with the controllers in
// the first one, contrary to runsc's expectation. `runsc start` leaves a process behind that keeps its output open, and
// runc's shim waits for the end of that output: so it goes to a file.
const (
	runscFile = "runsc"
	runscLog  = "runsc.log"
)

func (o Options) runsc() string {
	return fmt.Sprintf(`#!/bin/sh
case " $* " in *" start "*) exec >>%q 2>&1 ;; esac
exec %q --platform=systrap --ignore-cgroups "$@"
`, o.in(runscLog), o.GVisor)
}

// sandboxes is gVisor's part of containerd's configuration. The shim is runc's: gVisor's own gives itself a score that
// needs CAP_SYS_RESOURCE.
func (o Options) sandboxes() string {
	if o.GVisor == "" {
		return ""
	}
	return fmt.Sprintf(`
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runsc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runsc.options]
BinaryName = %q
SystemdCgroup = false
`, o.in(runscFile))
}

// CNIs are the plugins that give pods their interface: at a bridge, through which the node routes them, or one each at the node.
var CNIs = []string{"bridge", "ptp"}

// network is CNI's configuration.
func (o Options) network() (string, error) {
	type object = map[string]any
	var ranges [][]object
	var routes []object
	for _, prefix := range o.Pods {
		ranges = append(ranges, []object{{"subnet": prefix.String()}})
		all := "0.0.0.0/0"
		if prefix.Addr().Is6() {
			all = "::/0"
		}
		routes = append(routes, object{"dst": all})
	}
	own := object{"type": o.CNI, "ipMasq": false, "mtu": 1500, "ipam": object{"type": "host-local", "ranges": ranges, "routes": routes}}
	if o.CNI == "bridge" {
		own["bridge"], own["isGateway"], own["hairpinMode"] = Bridge, true, true
	}
	text, err := json.MarshalIndent(object{"cniVersion": "0.4.0", "name": "pods", "plugins": []object{
		own,
		{"type": "portmap", "capabilities": object{"portMappings": true}},
	}}, "", "  ")
	return string(text), err
}

// Bridge is the node's interface towards its pods, with the plugin bridge. CNI makes it with the first pod.
const Bridge = "cni0"

// resolver is the address that pods ask for names: the resolver's Service, in clusters with one.
const resolver = "10.96.0.10"

// kubelet is the kubelet's configuration.
func (o Options) kubelet() string {
	return fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: %[1]s/ca.crt}}
authorization: {mode: Webhook}
tlsCertFile: %[1]s/%[2]s.crt
tlsPrivateKeyFile: %[1]s/%[2]s.key
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: /%[3]s
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
clusterDomain: cluster.local
clusterDNS: [%[4]s]
resolvConf: ""
volumePluginDir: /var/lib/kubelet/volumeplugins
evictionHard: {memory.available: 50Mi, nodefs.available: 1%%, imagefs.available: 1%%, nodefs.inodesFree: 1%%}
imageGCHighThresholdPercent: 100
nodeStatusUpdateFrequency: 5s
syncFrequency: 10s
`, o.Plane, o.Name, o.Cgroup, resolver)
}
