// Package storm is BPF programs for tests: one that writes as many events as it is told, and one
// that can be attached in several ways. Nothing of the product loads it.
package storm
