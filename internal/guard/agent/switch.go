package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/shunt-lb/shunt/internal/event"
	"github.com/shunt-lb/shunt/internal/guard/policy"
	"github.com/shunt-lb/shunt/internal/host"
)

// Off is a feature, or a rule of one as FEATURE/RULE, that was switched off by hand. It stays off when the policy is read again, until
// a person switches it on, or the agent ends: the next agent follows its policy alone.
type Off struct {
	Name  string    `json:"name"`
	Since time.Time `json:"since"`
	By    By        `json:"by"`
}

// By is the user who has switched a feature or rule.
type By struct {
	UID   uint32  `json:"uid"`
	Login *uint32 `json:"login,omitempty"` // the user who logged in, before sudo; nil: not known (proc_pid_loginuid(5))
	PID   int32   `json:"pid"`
}

// String returns the user as text for people.
func (b By) String() string {
	if b.Login != nil && *b.Login != b.UID {
		return fmt.Sprintf("user %d, logged in as %d", b.UID, *b.Login)
	}
	return fmt.Sprintf("user %d", b.UID)
}

// Switched is a line about a switch by hand, and again about a policy that was read while something is off.
type Switched struct {
	Time time.Time `json:"time"`
	Name string    `json:"name"`
	On   bool      `json:"on"`
	Kept bool      `json:"kept"` // the feature or rule is still off after a policy was read
	By   By        `json:"by"`
}

// String returns the line as text.
func (s Switched) String() string {
	text := "switched off by hand"
	switch {
	case s.On:
		text = "switched on by hand"
	case s.Kept:
		text = "still switched off by hand"
	}
	return fmt.Sprintf("%s alert %s: %s, by %v", s.Time.Format("15:04:05.000"), event.Printable(s.Name), text, s.By)
}

// ErrUnknownFeature is in the error of Switch if no feature or rule has the name.
var ErrUnknownFeature = errors.New("no feature and no rule has this name")

// Switch switches a feature, or a rule of one, on or off by hand; changed is false if it was so already. If it fails, nothing has changed.
// A feature that is switched on works only if the policy asks for it.
func (a *Agent) Switch(name string, on bool, by By) (changed bool, err error) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	if a.ended {
		return false, errors.New("the agent is ending")
	}
	at := slices.IndexFunc(a.off, func(o Off) bool { return o.Name == name })
	if at < 0 && !slices.Contains(a.names(), name) {
		return false, fmt.Errorf("%w: %q; `shunt guard feature list --rules` lists them", ErrUnknownFeature, name)
	}
	if on == (at < 0) {
		return false, nil
	}
	off := slices.Clone(a.off)
	if on {
		off = slices.Delete(off, at, at+1)
	} else {
		off = append(off, Off{name, time.Now(), by})
	}
	if err := a.lifted(func() error { return a.apply(without(a.policy, off)) }); err != nil {
		return false, err
	}
	a.off = off
	a.tellSwitched(Switched{time.Now(), name, on, false, by})
	return true, nil
}

// tellSwitched writes the line as the agent's own: it is no event of the feature.
func (a *Agent) tellSwitched(s Switched) { a.queue.put("", Line{Switched: &s}) }

// names returns the features, and the rules of the policy as FEATURE/RULE.
func (a *Agent) names() (all []string) {
	for _, f := range a.features {
		name := f.status().Name
		all = append(all, name)
		for _, r := range rulesOf(a.policy, name) {
			all = append(all, name+"/"+r)
		}
	}
	return all
}

// rulesOf returns the names of a feature's rules; rules of decoys have none.
func rulesOf(p policy.Policy, feature string) []string {
	names := []string{}
	switch feature {
	case protectionName:
		for _, r := range p.Rules {
			names = append(names, r.Name)
		}
	case ConnectionsName:
		for _, c := range p.Connections {
			names = append(names, c.Name)
		}
	case detectionName:
		for _, r := range p.Detection.Active() {
			names = append(names, r.Name)
		}
	}
	return names
}

// without returns a policy without the features and rules that are switched off.
func without(p policy.Policy, off []Off) policy.Policy {
	for _, o := range off {
		feature, name, isRule := strings.Cut(o.Name, "/")
		switch {
		case feature == protectionName && isRule:
			p.Rules = slices.DeleteFunc(slices.Clone(p.Rules), func(r policy.Rule) bool { return r.Name == name })
		case feature == protectionName:
			p.Rules, p.IsDenialOff = nil, true
		case feature == ConnectionsName && isRule:
			p.Connections = slices.DeleteFunc(slices.Clone(p.Connections), func(c policy.Connection) bool { return c.Name == name })
		case feature == ConnectionsName:
			p.Connections = nil
		case feature == detectionName && isRule:
			p.Detection = p.Detection.WithoutDetecting(name)
		case feature == detectionName:
			p.Detection = policy.Detection{}
		case feature == DecoysName:
			p.Decoys = nil
		}
	}
	return p
}

// request asks for a switch. answer receives the result.
type request struct {
	Name string `json:"name"`
	On   bool   `json:"on"`
}

type answer struct {
	Changed bool   `json:"changed"`
	Error   string `json:"error,omitempty"`
}

func controlIn(folder string) string { return filepath.Join(folder, "control.sock") }

// switchTime limits a switch: a policy of many files takes a while to come into force.
const switchTime = 10 * time.Minute

// control reads one request of a connection, and answers it.
func (a *Agent) control(c *net.UnixConn) {
	_ = c.SetDeadline(time.Now().Add(answerTime))
	var asked request
	var said answer
	who, err := host.Peer(c)
	if err == nil {
		err = json.NewDecoder(c).Decode(&asked)
	}
	if err == nil {
		said.Changed, err = a.Switch(asked.Name, asked.On, By{who.Uid, loginOf(who.Pid), who.Pid})
	}
	if err != nil {
		said.Error = err.Error()
	}
	_ = c.SetDeadline(time.Now().Add(answerTime))
	_ = json.NewEncoder(c).Encode(said) // a client that does not wait for the answer finds the result in the status
}

// loginOf returns the user who logged in, whichever user the process has now; nil: nobody logged in.
func loginOf(process int32) *uint32 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/loginuid", process))
	if err != nil {
		return nil
	}
	uid, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32)
	if err != nil || uint32(uid) == ^uint32(0) {
		return nil
	}
	login := uint32(uid)
	return &login
}

// ErrNoAgent is in the error of AskToSwitch if no agent is at work.
var ErrNoAgent = errors.New("no `shunt guard run` is running")

// AskToSwitch asks the agent that is at work to switch a feature or rule; see Agent.Switch.
func AskToSwitch(folder, name string, on bool) (changed bool, err error) {
	c, err := dial(controlIn(folder))
	if err != nil {
		return false, fmt.Errorf("ask the agent to switch: %w", err)
	}
	if c == nil {
		return false, ErrNoAgent
	}
	defer c.Close() //nolint:errcheck // all was read
	_ = c.SetDeadline(time.Now().Add(switchTime))
	var said answer
	err = json.NewEncoder(c).Encode(request{name, on})
	if err == nil {
		err = json.NewDecoder(c).Decode(&said)
	}
	if err != nil {
		return false, fmt.Errorf("ask the agent to switch: %w; `shunt guard status` shows which features are on", err)
	}
	if said.Error != "" {
		return false, errors.New(said.Error)
	}
	return said.Changed, nil
}
