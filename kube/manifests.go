// Package kube holds what a cluster is given so that shunt-kube runs on its nodes.
package kube

import _ "embed"

// Rights is rbac.yaml: the service account, and what it may do.
//
//go:embed rbac.yaml
var Rights string

// Agent is agent.yaml: the DaemonSet and its configuration.
//
//go:embed agent.yaml
var Agent string
