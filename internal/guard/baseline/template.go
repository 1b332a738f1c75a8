package baseline

import (
	_ "embed" // the template of Debian

	"github.com/shunt-lb/shunt/internal/config"
)

// Debian is the name of the built-in template.
const Debian = "debian"

//go:embed debian.yaml
var debian []byte

// Key is the template's key, at the top of a file.
const Key = "baseline"

type templateEntry struct {
	config.Mark `json:"-"`
	Base        config.Word              `json:"base,omitempty" doc:"The template whose items this template includes." enum:"debian|none" default:"debian" example:"debian"`
	Own         config.List[itemEntry]   `json:"items,omitempty" doc:"Items of this template's own." example:"[]"`
	Change      config.List[changeEntry] `json:"change,omitempty" doc:"Items of the base that are switched off, or want other values." example:"[{id: ssh-max-auth-tries, max: 6}]"`
}

type itemEntry struct {
	config.Mark `json:"-"`
	ID          config.Text                `json:"id" doc:"The item's name in the output." min:"1" max:"60" example:"ssh-root-login"`
	Title       config.Phrase              `json:"title" doc:"What the item demands, as a short sentence." min:"1" max:"120" example:"root does not log in over SSH"`
	Section     config.Word                `json:"section" doc:"The part of the baseline." enum:"authentication|access|audit|intrusion|residual" example:"authentication"`
	Clause      config.Phrase              `json:"clause" doc:"Of GB/T 22239-2019." min:"1" max:"40" example:"8.1.4.1 a"`
	Manual      config.Many[config.Phrase] `json:"manual,omitempty" doc:"Manual pages that explain the setting." min:"1" max:"80" example:"[sshd_config(5)]"`
	Needs       config.Phrase              `json:"needs,omitempty" doc:"A path without which the item is not applicable." min:"1" max:"4095" example:"/etc/ssh/sshd_config"`
	ByHand      config.Phrase              `json:"by-hand,omitempty" doc:"Why fix leaves the item alone, and what a person should do." min:"1" max:"200" example:"ask who needs it"`
	Setting     settingEntry               `json:"setting,omitempty" doc:"A key of a file." example:"{}"`
	Sysctl      sysctlEntry                `json:"sysctl,omitempty" doc:"A kernel parameter, as the next boot sets it." example:"{}"`
	Mode        modeEntry                  `json:"mode,omitempty" doc:"Permissions." example:"{}"`
	Line        lineEntry                  `json:"line,omitempty" doc:"A line that a file must have, or must not have." example:"{}"`
	Absent      pathsEntry                 `json:"absent,omitempty" doc:"Files that must not be there." example:"{}"`
	Packages    namesEntry                 `json:"packages,omitempty" doc:"Packages, by the records of dpkg." example:"{}"`
	Services    namesEntry                 `json:"services,omitempty" doc:"systemd units, and whether they start at boot." example:"{}"`
	PAM         pamEntry                   `json:"pam,omitempty" doc:"A module in a service's stack." example:"{}"`
	Mount       mountEntry                 `json:"mount,omitempty" doc:"Options of a file system in /etc/fstab." example:"{}"`
	Accounts    accountsEntry              `json:"accounts,omitempty" doc:"A rule about accounts and groups." example:"{}"`
}

type settingEntry struct {
	config.Mark `json:"-"`
	Files       config.Many[config.Phrase] `json:"files" doc:"The files in the order in which they are read; patterns are allowed." min:"1" max:"4095" example:"[/etc/ssh/sshd_config]"`
	Into        config.Phrase              `json:"into,omitempty" doc:"The file into which fix adds the line; without it, the first of files." min:"1" max:"4095" example:"/etc/ssh/sshd_config"`
	Format      config.Word                `json:"format" doc:"How the file is read." enum:"sshd|words|equals|shell" example:"sshd"`
	InSection   config.Phrase              `json:"in-section,omitempty" doc:"The [section] that has the key." min:"1" max:"80" example:"Journal"`
	Key         config.Text                `json:"key" doc:"The key." min:"1" max:"80" example:"PermitRootLogin"`
	Is          config.Many[config.Phrase] `json:"is,omitempty" doc:"The values that are right." min:"1" max:"200" example:"[\"no\"]"`
	Min         config.Number              `json:"min,omitempty" doc:"The smallest number that is right." min:"0" max:"1000000000" example:"1"`
	Max         config.Number              `json:"max,omitempty" doc:"The largest number that is right." min:"0" max:"1000000000" example:"4"`
	Without     config.Many[config.Phrase] `json:"without,omitempty" doc:"Words that must not be in the list." min:"1" max:"200" example:"[3des-cbc]"`
	Covers      config.Phrase              `json:"covers,omitempty" doc:"A mask in octal digits, all bits of which must be set." min:"1" max:"4" example:"\"027\""`
	Unset       config.Phrase              `json:"unset,omitempty" doc:"The value without the key; if it is left out, a missing key is wrong." min:"1" max:"200" example:"\"yes\""`
	Write       config.Phrase              `json:"write,omitempty" doc:"The value that fix writes." min:"1" max:"200" example:"\"no\""`
}

type sysctlEntry struct {
	config.Mark `json:"-"`
	Key         config.Text                `json:"key" doc:"The parameter, with dots." min:"1" max:"120" example:"kernel.dmesg_restrict"`
	Is          config.Many[config.Phrase] `json:"is,omitempty" doc:"The values that are right." min:"1" max:"200" example:"[\"no\"]"`
	Min         config.Number              `json:"min,omitempty" doc:"The smallest number that is right." min:"0" max:"1000000000" example:"1"`
	Max         config.Number              `json:"max,omitempty" doc:"The largest number that is right." min:"0" max:"1000000000" example:"4"`
	Without     config.Many[config.Phrase] `json:"without,omitempty" doc:"Words that must not be in the list." min:"1" max:"200" example:"[3des-cbc]"`
	Covers      config.Phrase              `json:"covers,omitempty" doc:"A mask in octal digits, all bits of which must be set." min:"1" max:"4" example:"\"027\""`
	Unset       config.Phrase              `json:"unset,omitempty" doc:"The kernel's own value; if it is left out, a missing line is wrong." min:"1" max:"200" example:"\"2\""`
	Write       config.Phrase              `json:"write" doc:"The value that fix writes." min:"1" max:"200" example:"\"1\""`
}

type modeEntry struct {
	config.Mark `json:"-"`
	Paths       config.Many[config.Phrase] `json:"paths" doc:"The files; patterns are allowed." min:"1" max:"4095" example:"[/etc/shadow]"`
	AtMost      config.Phrase              `json:"at-most" doc:"The permissions, in octal digits, beyond which none may be set." min:"3" max:"4" example:"\"0640\""`
	Owner       config.Text                `json:"owner,omitempty" doc:"The owner." min:"1" max:"64" default:"root" example:"root"`
	Groups      config.Many[config.Text]   `json:"groups,omitempty" doc:"The group: one of these. fix writes the first." min:"1" max:"64" default:"root" example:"[shadow, root]"`
}

type lineEntry struct {
	config.Mark `json:"-"`
	Files       config.Many[config.Phrase] `json:"files" doc:"The files; patterns are allowed." min:"1" max:"4095" example:"[/etc/audit/rules.d/*.rules]"`
	Match       config.Phrase              `json:"match,omitempty" doc:"A regular expression that a line has to match." min:"1" max:"400" example:"^-w /etc/passwd"`
	Forbid      config.Phrase              `json:"forbid,omitempty" doc:"A regular expression that no line may match." min:"1" max:"400" example:"NOPASSWD"`
	Into        config.Phrase              `json:"into,omitempty" doc:"The file into which fix adds a line." min:"1" max:"4095" example:"/etc/audit/rules.d/50-shunt-baseline.rules"`
	Add         config.Phrase              `json:"add,omitempty" doc:"The line that fix adds." min:"1" max:"400" example:"-w /etc/passwd -p wa -k identity"`
	Mode        config.Phrase              `json:"mode,omitempty" doc:"The permissions of a file that fix makes." min:"3" max:"4" default:"0644" example:"\"0640\""`
}

type pathsEntry struct {
	config.Mark `json:"-"`
	Paths       config.Many[config.Phrase] `json:"paths" doc:"The files; folders may be patterns." min:"1" max:"4095" example:"[/etc/hosts.equiv]"`
}

type namesEntry struct {
	config.Mark `json:"-"`
	Names       config.Many[config.Text] `json:"names" doc:"The names." min:"1" max:"200" example:"[telnetd]"`
	Wanted      config.Boolean           `json:"wanted" doc:"true: one of them must be installed, or start; false: none may." example:"false"`
}

type pamEntry struct {
	config.Mark `json:"-"`
	Service     config.Text                `json:"service" doc:"The file in /etc/pam.d." min:"1" max:"80" example:"common-auth"`
	Type        config.Word                `json:"type" doc:"The stack." enum:"auth|account|password|session" example:"auth"`
	Module      config.Text                `json:"module" doc:"The module's file." min:"1" max:"80" example:"pam_unix.so"`
	Control     config.Many[config.Phrase] `json:"control,omitempty" doc:"The control: one of these." min:"1" max:"80" example:"[required, requisite]"`
	Has         config.Many[config.Text]   `json:"has,omitempty" doc:"Options that must be set." min:"1" max:"80" example:"[use_uid]"`
	Without     config.Many[config.Text]   `json:"without,omitempty" doc:"Options that must not be set." min:"1" max:"80" example:"[nullok]"`
	Option      config.Text                `json:"option,omitempty" doc:"An option with a number." min:"1" max:"80" example:"remember"`
	Min         config.Number              `json:"min,omitempty" doc:"The smallest number of that option." min:"0" max:"1000000" example:"5"`
	Add         config.Phrase              `json:"add,omitempty" doc:"The rule that fix adds if the module has none." min:"1" max:"200" example:"\"password required pam_pwhistory.so remember=5\""`
}

type mountEntry struct {
	config.Mark `json:"-"`
	Path        config.Phrase            `json:"path" doc:"The path of the file system." min:"1" max:"4095" example:"/tmp"`
	Options     config.Many[config.Text] `json:"options" doc:"Options that must be set." min:"1" max:"80" example:"[nodev, nosuid]"`
}

type accountsEntry struct {
	config.Mark `json:"-"`
	Rule        config.Word   `json:"rule" doc:"The rule." enum:"no-empty-password|passwords-in-shadow|only-root-has-uid-0|root-has-gid-0|unique-uids|unique-names|unique-gids|unique-groups|groups-exist|system-accounts-without-shell|strong-hashes|no-network-entries|shadow-group-empty|passwords-expire" example:"unique-uids"`
	Max         config.Number `json:"max,omitempty" doc:"Of passwords-expire: after how many days at the latest." min:"1" max:"100000" example:"365"`
}

type changeEntry struct {
	config.Mark `json:"-"`
	ID          config.Text                `json:"id" doc:"The item of the base." min:"1" max:"60" example:"ssh-max-auth-tries"`
	Off         config.Boolean             `json:"off,omitempty" doc:"The item is left out." default:"false" example:"true"`
	Is          config.Many[config.Phrase] `json:"is,omitempty" doc:"The values that are right." min:"1" max:"200" example:"[\"no\"]"`
	Min         config.Number              `json:"min,omitempty" doc:"The smallest number that is right." min:"0" max:"1000000000" example:"1"`
	Max         config.Number              `json:"max,omitempty" doc:"The largest number that is right." min:"0" max:"1000000000" example:"4"`
	Without     config.Many[config.Phrase] `json:"without,omitempty" doc:"Words that must not be in the list." min:"1" max:"200" example:"[3des-cbc]"`
	Covers      config.Phrase              `json:"covers,omitempty" doc:"A mask in octal digits, all bits of which must be set." min:"1" max:"4" example:"\"027\""`
	Write       config.Phrase              `json:"write,omitempty" doc:"The value that fix writes." min:"1" max:"200" example:"\"6\""`
	AtMost      config.Phrase              `json:"at-most,omitempty" doc:"Of permissions: beyond which none may be set." min:"3" max:"4" example:"\"0600\""`
}
