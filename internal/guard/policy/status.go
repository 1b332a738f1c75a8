package policy

// Gap is an operation of a rule that the kernel does not deny, or not every time.
type Gap struct {
	Rule      string `json:"rule"`
	Operation string `json:"operation"`
	Why       string `json:"why"`
	Denies    bool   `json:"denies"` // the rule's mode is deny
}

// RuleStatus is a rule in force, for people.
type RuleStatus struct {
	Name string `json:"name"`
	Text string `json:"text"`
}
