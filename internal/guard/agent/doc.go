// Package agent is the process of `shunt guard run`: its features, each of which a change of the policy switches on, off or
// over. Their lines go through one queue, in which alerts have a part of their own.
package agent
