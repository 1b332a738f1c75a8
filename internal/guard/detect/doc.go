// Package detect is `shunt guard events`: sensors report events of processes, and rules judge them.
package detect
