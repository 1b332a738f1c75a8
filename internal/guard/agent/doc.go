// Package agent is the process of `shunt guard run`: it protects and detects by one policy, and switches each on, off or over
// when the policy changes. What both tell goes through one queue, in which alerts have a place of their own.
package agent
