package rule

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

var techniqueForm = regexp.MustCompile(`^T[0-9]{4}(\.[0-9]{3})?$`)

// Technique returns ATT&CK's name of a technique; empty: it is not in the list. The list has Enterprise techniques for
// Linux whose use by a process on a host can be seen.
func Technique(id string) string {
	if !techniqueForm.MatchString(id) {
		return ""
	}
	return techniques[id]
}

// SuggestTechnique returns the technique that an unknown ID may mean.
func SuggestTechnique(id string) string {
	whole, _, isSub := strings.Cut(id, ".")
	switch {
	case !techniqueForm.MatchString(id):
		return "write it as T1059 or T1059.004"
	case isSub && techniques[whole] != "":
		var subs []string
		for other := range techniques {
			if strings.HasPrefix(other, whole+".") {
				subs = append(subs, other)
			}
		}
		slices.Sort(subs)
		return fmt.Sprintf("%s is %s: write one of %s", whole, techniques[whole], strings.Join(append(subs, whole), ", "))
	}
	return "see https://attack.mitre.org/matrices/enterprise/linux/"
}

// techniques are the names by ID, from MITRE ATT&CK Enterprise (https://attack.mitre.org).
var techniques = map[string]string{
	"T1003": "OS Credential Dumping", "T1003.007": "Proc Filesystem", "T1003.008": "/etc/passwd and /etc/shadow",
	"T1014": "Rootkit", "T1016": "System Network Configuration Discovery", "T1018": "Remote System Discovery",
	"T1021": "Remote Services", "T1021.004": "SSH", "T1027": "Obfuscated Files or Information",
	"T1030": "Data Transfer Size Limits", "T1033": "System Owner/User Discovery",
	"T1036": "Masquerading", "T1036.003": "Rename Legitimate Utilities", "T1036.004": "Masquerade Task or Service", "T1036.005": "Match Legitimate Resource Name or Location",
	"T1040": "Network Sniffing", "T1041": "Exfiltration Over C2 Channel", "T1046": "Network Service Discovery",
	"T1048": "Exfiltration Over Alternative Protocol", "T1049": "System Network Connections Discovery",
	"T1053": "Scheduled Task/Job", "T1053.002": "At", "T1053.003": "Cron", "T1053.006": "Systemd Timers",
	"T1055": "Process Injection", "T1055.008": "Ptrace System Calls", "T1055.009": "Proc Memory", "T1055.014": "VDSO Hijacking",
	"T1056": "Input Capture", "T1057": "Process Discovery",
	"T1059": "Command and Scripting Interpreter", "T1059.004": "Unix Shell", "T1059.006": "Python", "T1059.007": "JavaScript", "T1059.011": "Lua",
	"T1068": "Exploitation for Privilege Escalation",
	"T1070": "Indicator Removal", "T1070.002": "Clear Linux or Mac System Logs", "T1070.003": "Clear Command History", "T1070.004": "File Deletion", "T1070.006": "Timestomp",
	"T1071": "Application Layer Protocol", "T1071.001": "Web Protocols", "T1071.004": "DNS",
	"T1074": "Data Staged", "T1078": "Valid Accounts", "T1078.003": "Local Accounts", "T1082": "System Information Discovery", "T1083": "File and Directory Discovery",
	"T1087": "Account Discovery", "T1087.001": "Local Account", "T1090": "Proxy", "T1095": "Non-Application Layer Protocol",
	"T1098": "Account Manipulation", "T1098.004": "SSH Authorized Keys", "T1105": "Ingress Tool Transfer", "T1110": "Brute Force",
	"T1132": "Data Encoding", "T1136": "Create Account", "T1136.001": "Local Account", "T1140": "Deobfuscate/Decode Files or Information",
	"T1190": "Exploit Public-Facing Application", "T1195": "Supply Chain Compromise", "T1203": "Exploitation for Client Execution",
	"T1204": "User Execution", "T1204.002": "Malicious File", "T1205": "Traffic Signaling", "T1205.001": "Port Knocking", "T1205.002": "Socket Filters",
	"T1210": "Exploitation of Remote Services", "T1219": "Remote Access Tools", "T1222": "File and Directory Permissions Modification", "T1222.002": "Linux and Mac File and Directory Permissions Modification",
	"T1485": "Data Destruction", "T1486": "Data Encrypted for Impact", "T1489": "Service Stop", "T1490": "Inhibit System Recovery", "T1496": "Resource Hijacking", "T1498": "Network Denial of Service", "T1499": "Endpoint Denial of Service",
	"T1505": "Server Software Component", "T1505.003": "Web Shell", "T1529": "System Shutdown/Reboot", "T1531": "Account Access Removal",
	"T1543": "Create or Modify System Process", "T1543.002": "Systemd Service", "T1543.005": "Container Service",
	"T1546": "Event Triggered Execution", "T1546.004": "Unix Shell Configuration Modification", "T1546.005": "Trap", "T1546.016": "Installer Packages",
	"T1547": "Boot or Logon Autostart Execution", "T1547.006": "Kernel Modules and Extensions", "T1547.013": "XDG Autostart Entries",
	"T1548": "Abuse Elevation Control Mechanism", "T1548.001": "Setuid and Setgid", "T1548.003": "Sudo and Sudo Caching",
	"T1552": "Unsecured Credentials", "T1552.001": "Credentials In Files", "T1552.003": "Bash History", "T1552.004": "Private Keys", "T1552.005": "Cloud Instance Metadata API",
	"T1554": "Compromise Host Software Binary", "T1556": "Modify Authentication Process", "T1556.003": "Pluggable Authentication Modules",
	"T1560": "Archive Collected Data", "T1561": "Disk Wipe", "T1561.001": "Disk Content Wipe", "T1561.002": "Disk Structure Wipe",
	"T1562": "Impair Defenses", "T1562.001": "Disable or Modify Tools", "T1562.003": "Impair Command History Logging", "T1562.004": "Disable or Modify System Firewall", "T1562.012": "Disable or Modify Linux Audit System",
	"T1564": "Hide Artifacts", "T1564.001": "Hidden Files and Directories", "T1564.013": "Bind Mounts",
	"T1565": "Data Manipulation", "T1567": "Exfiltration Over Web Service", "T1570": "Lateral Tool Transfer", "T1571": "Non-Standard Port", "T1572": "Protocol Tunneling", "T1573": "Encrypted Channel",
	"T1574": "Hijack Execution Flow", "T1574.006": "Dynamic Linker Hijacking", "T1574.007": "Path Interception by PATH Environment Variable",
	"T1609": "Container Administration Command", "T1610": "Deploy Container", "T1611": "Escape to Host", "T1613": "Container and Resource Discovery",
	"T1620": "Reflective Code Loading", "T1622": "Debugger Evasion", "T1653": "Power Settings",
}
