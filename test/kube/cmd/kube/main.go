// Command kube is Kubernetes in one binary, for tests. etcd and the components of Kubernetes are
// subcommands with their own flags. Two more subcommands run several of them:
//
//	kube control-plane [--address ADDRESS] [--node NAME=ADDRESS,ADDRESS …] FOLDER SERVICE-RANGE
//	kube node --name … --folder …
//
// control-plane runs etcd and the control plane, writes FOLDER/admin.kubeconfig, and prints "ready". node
// runs containerd and a kubelet. Both stop their processes at SIGTERM, SIGINT or the end of their
// standard input.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"

	"github.com/shunt-lb/shunt/test/kube/node"
	"github.com/shunt-lb/shunt/test/kube/plane"
)

func main() {
	component := ""
	if len(os.Args) > 1 {
		component = os.Args[1]
	}
	var command *cobra.Command
	switch component {
	case "control-plane":
		own(component, controlPlane(os.Args[2:]))
	case "node":
		own(component, runNode(os.Args[2:]))
	case node.InitArgument:
		own(component, node.Init(strings.Join(os.Args[2:], " ")))
	case "etcd":
		etcdmain.Main(os.Args[1:])
		return
	case "kube-apiserver":
		command = apiserver.NewAPIServerCommand()
	case "kube-controller-manager":
		command = controllers.NewControllerManagerCommand()
	case "kube-scheduler":
		command = scheduler.NewSchedulerCommand()
	case "kubelet":
		command = kubelet.NewKubeletCommand(context.Background())
	case "kube-proxy":
		command = proxy.NewProxyCommand()
	default:
		fmt.Fprintf(os.Stderr, "kube: there is no component %q; it is one of control-plane, node, etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kube-proxy\n", component)
		os.Exit(2)
	}
	os.Args = os.Args[1:]
	os.Exit(cli.Run(command))
}

// own ends the process after a subcommand of our own, with its error.
func own(component string, err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "kube %s: %v\n", component, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// untilTold returns a context that ends at a signal, or when the parent process ends.
func untilTold() (context.Context, context.CancelFunc) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	return ctx, stop
}

func controlPlane(arguments []string) error {
	var o plane.Options
	var err error
	if o.Binary, err = os.Executable(); err != nil {
		return err
	}
	flags := flag.NewFlagSet("control-plane", flag.ContinueOnError)
	flags.TextVar(&o.Address, "address", netip.Addr{}, "where nodes reach the apiserver")
	flags.Func("node", "NAME=ADDRESS,ADDRESS of one that may join", func(text string) error {
		name, list, _ := strings.Cut(text, "=")
		addresses, err := addresses(list)
		o.Nodes = append(o.Nodes, plane.Node{Name: name, Addresses: addresses})
		return err
	})
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if flags.NArg() != 2 {
		return fmt.Errorf("%d arguments: give a folder and a range of cluster IPs, 10.96.0.0/16 for example", flags.NArg())
	}
	o.Folder, o.ServiceRange = flags.Arg(0), flags.Arg(1)
	ctx, stop := untilTold()
	defer stop()
	return plane.Run(ctx, o, func() { fmt.Println("ready") })
}

func runNode(arguments []string) error {
	var o node.Options
	var err error
	if o.Binary, err = os.Executable(); err != nil {
		return err
	}
	flags := flag.NewFlagSet("node", flag.ContinueOnError)
	flags.StringVar(&o.Name, "name", "", "the Node object's name")
	flags.StringVar(&o.Folder, "folder", "", "for the node's files")
	flags.StringVar(&o.Plane, "plane", "", "the folder of the control plane")
	flags.StringVar(&o.Images, "images", "", "a folder with images, *.tar")
	flags.StringVar(&o.Cgroup, "cgroup", "", "the name of the node's cgroup")
	flags.StringVar(&o.CNI, "cni", node.CNIs[0], "CNI's plugin for pods: "+strings.Join(node.CNIs, " or "))
	flags.StringVar(&o.GVisor, "gvisor", "", "gVisor's runsc; empty: no pod runs in gVisor")
	flags.Func("addresses", "ADDRESS,ADDRESS of the node", func(text string) (err error) {
		o.Addresses, err = addresses(text)
		return err
	})
	flags.Func("pods", "PREFIX,PREFIX of the pods' addresses", func(text string) error {
		for part := range strings.SplitSeq(text, ",") {
			prefix, err := netip.ParsePrefix(part)
			if err != nil {
				return err
			}
			o.Pods = append(o.Pods, prefix)
		}
		return nil
	})
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	for _, needed := range []string{o.Name, o.Folder, o.Plane, o.Images, o.Cgroup} {
		if needed == "" || len(o.Addresses) == 0 || len(o.Pods) == 0 || flags.NArg() != 0 {
			return fmt.Errorf("give all of --name, --folder, --plane, --images, --cgroup, --addresses and --pods, and nothing else")
		}
	}
	ctx, stop := untilTold()
	defer stop()
	return node.Run(ctx, o)
}

func addresses(list string) (all []netip.Addr, err error) {
	for text := range strings.SplitSeq(list, ",") {
		address, err := netip.ParseAddr(text)
		if err != nil {
			return nil, err
		}
		all = append(all, address)
	}
	return all, nil
}
