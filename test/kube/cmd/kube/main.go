// Command kube is a Kubernetes control plane in one binary, for tests. etcd, kube-apiserver and
// kube-controller-manager are subcommands with the flags that they have by themselves;
//
//	kube control-plane FOLDER SERVICE-RANGE
//
// runs all three, writes FOLDER/admin.kubeconfig, prints "ready", and stops them at SIGTERM, SIGINT or
// the end of its standard input.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
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
		if err := controlPlane(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "kube control-plane:", err)
			os.Exit(1)
		}
		return
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
		fmt.Fprintf(os.Stderr, "kube: there is no component %q; it is one of control-plane, etcd, kube-apiserver, kube-controller-manager\n", component)
		os.Exit(2)
	}
	os.Args = os.Args[1:]
	os.Exit(cli.Run(command))
}

func controlPlane(arguments []string) error {
	if len(arguments) != 2 {
		return fmt.Errorf("%d arguments: give a folder and a range of cluster IPs, 10.96.0.0/16 for example", len(arguments))
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // ends when the process that started this one ends
		stop()
	}()
	return plane.Run(ctx, plane.Options{Binary: self, Folder: arguments[0], ServiceRange: arguments[1]}, func() { fmt.Println("ready") })
}
