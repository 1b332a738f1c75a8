// Package detect is `shunt guard events`: sensors tell what processes do, and rules judge it.
package detect
