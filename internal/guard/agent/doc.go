// Package agent is the process of `shunt guard run`: its features, each switched on, off or over by one policy
// when the policy changes. What they tell goes through one queue, in which alerts have a place of their own.
package agent
