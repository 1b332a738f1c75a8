// Package storm has BPF programs for tests: one that writes a given number of events, and one that
// can be attached in several ways. Nothing of the product loads it.
package storm
