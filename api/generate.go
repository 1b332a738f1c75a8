// Package api is the folder of the public API. The schema is v1/shunt.proto; the Go in v1 is
// generated from it and committed, so that building needs no generator.
package api

//go:generate go run github.com/bufbuild/buf/cmd/buf@v1.75.0 lint
//go:generate go run github.com/bufbuild/buf/cmd/buf@v1.75.0 generate
