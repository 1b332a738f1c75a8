package rule

import "slices"

// Lists that several conditions use.
const (
	shells  = `["sh", "bash", "dash", "ash", "zsh", "ksh", "mksh", "fish", "csh", "tcsh", "busybox", "rbash"]`
	servers = `["nginx", "apache2", "httpd", "lighttpd", "caddy", "php-fpm", "tomcat", "java", "node", "gunicorn", "uwsgi"]`
	install = `["dpkg", "dpkg-preconfigure", "apt", "apt-get", "rpm", "dnf", "yum", "zypper", "pacman", "systemd", "systemctl", "ansible"]`
	traced  = `["gdb", "gdbserver", "lldb", "lldb-server", "strace", "ltrace", "rr", "dlv", "perf", "criu"]`
	account = `["passwd", "chpasswd", "useradd", "userdel", "usermod", "groupadd", "groupdel", "groupmod", "gpasswd", "chage", "chsh", "chfn", "vipw", "pwck", "grpck", "pwconv", "systemd-sysusers", "adduser", "dpkg", "rpm"]`
	readers = `["login", "sshd", "sshd-session", "su", "sudo", "cron", "atd", "unix_chkpwd", "polkit-agent-helper-1", "gdm-session-worker", "lightdm", "passwd", "chpasswd", "useradd", "userdel", "usermod", "chage", "vipw", "pwck", "systemd-sysusers", "systemd", "dpkg"]`

	outward = `stdin.kind == "inet" && stdout.kind == "inet" && stdin.direction == "out" && stdout.direction == "out" && !stdin.loopback`
	inward  = `stdin.kind == "inet" && stdout.kind == "inet" && stdin.direction == "in" && stdout.direction == "in" && !stdin.loopback`
	toPeer  = "{process.program} has its stdin and stdout on a connection to {stdin.remote}:{stdin.remote_port}"
)

// execution are rules for executed programs, and for the descriptors that they begin with.
var execution = []Rule{
	{Name: "reverse-shell", Doc: "stdin and stdout are a connection that this host made", On: []string{Exec, Dup, Connect}, Severity: "critical", Mitre: []string{"T1059.004"},
		If: outward, Tell: toPeer},
	{Name: "reverse-shell-relay", Doc: "a shell talks to a parent that has connected to another host, as socat does", On: []string{Exec}, Severity: "critical", Mitre: []string{"T1059.004"},
		If: `process.name in ` + shells + ` && stdin.kind == "unix" && stdin.inode == stdout.inode && exec.parent_outs > 0`, Tell: "{process.program} has its stdin and stdout at {parent.name}, which has connected to another host"},
	{Name: "bind-shell", Doc: "a shell talks over a connection that was accepted", On: []string{Exec}, Severity: "critical", Mitre: []string{"T1059.004"},
		If: `process.name in ` + shells + ` && ` + inward, Tell: toPeer + ", which was accepted", Noise: "services of inetd that are shell scripts"},
	{Name: "connect-with-low-socket", Doc: "connect by a process that has a socket as descriptor 0, 1, 2 or 3", On: []string{Connect}, Severity: "medium", Mitre: []string{"T1059.004"}, IsOff: true,
		If: `stdin.kind == "inet" || stdout.kind == "inet" || stderr.kind == "inet" || fd3.kind == "inet"`, Tell: "{process.program} connects to {socket.remote}:{socket.remote_port} with a socket among its descriptors 0 to 3", Noise: "every client whose first descriptor is its socket, as a Python script's is"},
	{Name: "memfd-exec", Doc: "a program without a file is executed from memory", On: []string{Exec}, Severity: "high", Mitre: []string{"T1620"},
		If: `process.memfd`, Tell: "{process.program} was executed from memory", Noise: "runc, which executes a copy of itself this way"},
	{Name: "deleted-exec", Doc: "a program is executed after its file was deleted", On: []string{Exec}, Severity: "high", Mitre: []string{"T1070.004"},
		If: `process.deleted && !process.memfd`, Tell: "{process.program} was executed after its file had been deleted"},
	{Name: "shared-memory-exec", Doc: "a program is executed in /dev/shm", On: []string{Exec}, Severity: "high", Mitre: []string{"T1564"},
		If: `exec.path.startsWith("/dev/shm/") || process.program.startsWith("/dev/shm/")`, Tell: "{exec.path} was executed"},
	{Name: "temporary-exec", Doc: "a program is executed in a folder for temporary files", On: []string{Exec}, Severity: "low", Mitre: []string{"T1204.002"}, IsOff: true,
		If: `exec.path.matches("^/(var/)?tmp/") || process.program.matches("^/(var/)?tmp/")`, Tell: "{exec.path} was executed", Noise: "builds, tests and installers"},
	{Name: "hidden-exec", Doc: "a program with a hidden name is executed", On: []string{Exec}, Severity: "medium", Mitre: []string{"T1564.001"},
		If: `process.name.startsWith(".")`, Tell: "{process.program} was executed"},
	{Name: "shell-by-server", Doc: "a web server has started a shell", On: []string{Exec}, Severity: "high", Mitre: []string{"T1505.003"},
		If: `process.name in ` + shells + ` && ancestors.exists(a, a.name in ` + servers + `)`, Tell: "{process.args} was started below {parent.name}", Noise: "applications that start shells themselves, and build servers in Java"},
}

// privilege are rules for users, and for other processes.
var privilege = []Rule{
	{Name: "becomes-root", Doc: "a process without root's user ID takes it", On: []string{SetUID}, Severity: "high", Mitre: []string{"T1548.001"},
		If: `setuid.from_uid != 0 && setuid.from_euid != 0 && (process.uid == 0 || process.euid == 0)`, Tell: "{process.program} became root, and was user {setuid.from_uid}"},
	{Name: "setuid-program", Doc: "a program with the set-user-ID bit is executed that no distribution has", On: []string{Exec}, Severity: "high", Mitre: []string{"T1548.001"},
		If:   `process.uid != 0 && process.euid == 0 && !process.program.matches("^/(usr/)?(s?bin|lib|lib64|libexec)/")`,
		Tell: "{process.program} runs as root, started by user {process.uid}"},
	{Name: "setuid-shell", Doc: "a shell has root's rights by the set-user-ID bit", On: []string{Exec}, Severity: "critical", Mitre: []string{"T1548.001"},
		If: `process.name in ` + shells + ` && process.uid != 0 && process.euid == 0`, Tell: "{process.program} runs as root, started by user {process.uid}"},
	{Name: "ptrace-attach", Doc: "a program that is no debugger takes control of another process", On: []string{Ptrace}, Severity: "high", Mitre: []string{"T1055.008"},
		If: `ptrace.request in ["attach", "seize", "poke"] && !(process.name in ` + traced + `)`, Tell: "{process.program} attaches to process {ptrace.target}"},
	{Name: "memory-write", Doc: "a process writes to another one's memory with process_vm_writev", On: []string{Ptrace}, Severity: "high", Mitre: []string{"T1055"},
		If: `ptrace.request == "write" && ptrace.target != process.pid && !(process.name in ` + traced + `)`, Tell: "{process.program} writes to the memory of process {ptrace.target}"},
	{Name: "proc-memory-write", Doc: "a process opens a process's memory in /proc to write to it", On: []string{Open}, Severity: "high", Mitre: []string{"T1055.009"},
		If: `file.write && file.path.matches("^/proc/[0-9]+/(task/[0-9]+/)?mem$") && !(process.name in ` + traced + `)`, Tell: "{process.program} opened {file.path} to write"},
	{Name: "kernel-hook-write", Doc: "a process opens a file for writing whose contents the kernel executes as root", On: []string{Open}, Severity: "critical", Mitre: []string{"T1611"},
		If:   `file.write && file.path.matches("(^/proc/sys/kernel/(core_pattern|modprobe|hotplug)|/uevent_helper|/release_agent|^/proc/sys/fs/binfmt_misc/register)$") && !(process.name in ["systemd", "systemd-sysctl", "sysctl", "systemd-binfmt", "apport"])`,
		Tell: "{process.program} opened {file.path} to write"},
	{Name: "mount-over-process", Doc: "something is mounted over a process's folder in /proc, which hides it", On: []string{Mount}, Severity: "critical", Mitre: []string{"T1564.013"},
		If: `mount.target.matches("^/proc/[0-9]+/?$")`, Tell: "{process.program} mounts over {mount.target}"},
	{Name: "mount-over-programs", Doc: "something is mounted over a folder of programs or settings", On: []string{Mount}, Severity: "high", Mitre: []string{"T1564.013"},
		If: `mount.target.matches("^/(etc|usr|bin|sbin|lib|lib64)(/|$)") && !(process.name in ["systemd", "mount", "runc", "crun", "bwrap", "snap-confine"])`, Tell: "{process.program} mounts over {mount.target}"},
}

// kernels are rules for the kernel and the disk.
var kernels = []Rule{
	{Name: "module-load", Doc: "a kernel module is loaded", On: []string{Module}, Severity: "medium", Mitre: []string{"T1547.006"},
		If: `!(process.name in ["systemd", "systemd-udevd", "systemd-modules-load", "(udev-worker)"])`, Tell: "{process.program} loaded the module {module.name}", Noise: "modprobe by a person or by the kernel, which then is a child of kthreadd"},
	{Name: "bpf-load", Doc: "a program that is not known to do so loads a BPF program", On: []string{BPF}, Severity: "medium", Mitre: []string{"T1014"},
		If: `!(process.name in ["shunt", "shunt-kube", "systemd", "bpftool", "bpftrace", "runc", "crun", "cilium-agent", "calico-node", "ip", "tc"])`, Tell: "{process.program} loads a BPF program"},
	{Name: "kernel-memory", Doc: "the kernel's memory is opened", On: []string{Open}, Severity: "high", Mitre: []string{"T1014"},
		If: `file.path in ["/dev/mem", "/dev/kmem", "/dev/port", "/proc/kcore"]`, Tell: "{process.program} opened {file.path}", Noise: "dmidecode on old machines, and crash"},
	{Name: "disk-write", Doc: "a disk is opened to write past its file system", On: []string{Open}, Severity: "high", Mitre: []string{"T1561"},
		If:   `file.write && file.path.matches("^/dev/(sd[a-z]+|vd[a-z]+|xvd[a-z]+|nvme[0-9]+n[0-9]+|mmcblk[0-9]+|dm-[0-9]+)(p?[0-9]+)?$") && !process.name.matches("^(fsck|e2fsck|mkfs|mke2fs|tune2fs|resize2fs|xfs_|btrfs|parted|fdisk|sfdisk|sgdisk|lvm|cryptsetup|mdadm|systemd|qemu|grub)")`,
		Tell: "{process.program} opened {file.path} to write"},
	{Name: "metadata-service", Doc: "a process asks the cloud's metadata service, which hands out credentials", On: []string{Connect}, Severity: "medium", Mitre: []string{"T1552.005"},
		If: `socket.remote in ["169.254.169.254", "fd00:ec2::254", "100.100.100.200"] && !process.name.matches("^(cloud-init|python3.*|amazon-ssm-agent|google_.*|waagent|walinuxagent|ec2-.*)$")`, Tell: "{process.program} connects to {socket.remote}", Noise: "applications that use the machine's own role"},
}

// files are rules for files that intruders change or read.
var files = []Rule{
	{Name: "account-write", Doc: "the list of users or of passwords is opened to write", On: []string{Open}, Severity: "high", Mitre: []string{"T1136.001"},
		If: `file.write && file.path.matches("^/etc/(passwd|shadow|group|gshadow)[-+]?$") && !(process.name in ` + account + `)`, Tell: "{process.program} opened {file.path} to write"},
	{Name: "password-read", Doc: "the list of passwords is read", On: []string{Open}, Severity: "high", Mitre: []string{"T1003.008"},
		If: `!file.write && file.path.matches("^/etc/g?shadow-?$") && !(process.name in ` + readers + `)`, Tell: "{process.program} opened {file.path}"},
	{Name: "sudoers-write", Doc: "the rules of sudo are opened to write", On: []string{Open}, Severity: "high", Mitre: []string{"T1548.003"},
		If: `file.write && file.path.matches("^/etc/(sudoers|sudoers\\.d/[^/]+)$") && !(process.name in ["visudo", "dpkg", "rpm"])`, Tell: "{process.program} opened {file.path} to write"},
	{Name: "cron-write", Doc: "a job of cron is written", On: []string{Open}, Severity: "medium", Mitre: []string{"T1053.003"},
		If: `file.write && file.path.matches("^/etc/(crontab|anacrontab|cron\\.(allow|deny)|cron\\.(d|hourly|daily|weekly|monthly|yearly)/[^/]+)$|^/var/spool/(cron|cron/crontabs|cron/tabs|cron/atjobs|at|atjobs)/[^/]+$") && !(process.name in ["crontab", "cron", "crond", "at", "atd", "dpkg", "rpm"])`, Tell: "{process.program} opened {file.path} to write"},
	{Name: "service-write", Doc: "a service of systemd is written", On: []string{Open}, Severity: "medium", Mitre: []string{"T1543.002"},
		If: `file.write && file.path.matches("^/(etc|run|usr/lib|lib|usr/local/lib)/systemd/(system|user)/([^/]+/)?[^/]+$") && !(process.name in ` + install + `)`, Tell: "{process.program} opened {file.path} to write"},
	{Name: "profile-write", Doc: "a file is written that shells execute when they start", On: []string{Open}, Severity: "medium", Mitre: []string{"T1546.004"},
		If: `file.write && file.path.matches("(^/etc/(profile|bash\\.bashrc|zsh/[^/]+|profile\\.d/[^/]+)$|^/(root|home/[^/]+)/\\.(bashrc|bash_profile|bash_login|profile|zshrc|zshenv|bash_logout)$)") && !(process.name in ["useradd", "adduser", "dpkg", "rpm"])`, Tell: "{process.program} opened {file.path} to write", Noise: "editors: a person who changes a profile"},
	{Name: "ssh-keys-write", Doc: "a list of keys that may log in is written", On: []string{Open}, Severity: "high", Mitre: []string{"T1098.004"},
		If: `file.write && file.path.matches("/\\.ssh/authorized_keys2?$")`, Tell: "{process.program} opened {file.path} to write", Noise: "ssh-copy-id, and a person who adds a key"},
	{Name: "private-key-read", Doc: "a private key of ssh is read by another program", On: []string{Open}, Severity: "high", Mitre: []string{"T1552.004"},
		If: `!file.write && file.path.matches("/\\.ssh/id_[a-z0-9_]+$") && !(process.name in ["ssh", "ssh-add", "ssh-agent", "ssh-keygen", "scp", "sftp", "git"])`, Tell: "{process.program} opened {file.path}", Noise: "backups"},
	{Name: "preload-write", Doc: "the list of libraries that every program loads is written", On: []string{Open}, Severity: "critical", Mitre: []string{"T1574.006"},
		If: `file.write && file.path.matches("^/etc/ld\\.so\\.(preload|conf|conf\\.d/[^/]+)$")`, Tell: "{process.program} opened {file.path} to write"},
	{Name: "login-module-write", Doc: "a module or a setting of PAM is written", On: []string{Open}, Severity: "high", Mitre: []string{"T1556.003"},
		If: `file.write && file.path.matches("(^/etc/pam\\.d/[^/]+$|/security/pam_[a-z0-9_]+\\.so$)") && !(process.name in ["dpkg", "rpm", "pam-auth-update"])`, Tell: "{process.program} opened {file.path} to write"},
	{Name: "log-write", Doc: "a record of logins is opened to write by another program", On: []string{Open}, Severity: "high", Mitre: []string{"T1070.002"},
		If: `file.write && file.path.matches("^/var/(log/(wtmp|btmp|lastlog|auth\\.log|secure)|run/utmp)$|^/run/utmp$") && !(process.name in ["login", "sshd", "sshd-session", "systemd-update-utmp", "systemd-logind", "rsyslogd", "syslog-ng", "logrotate", "agetty", "init", "sudo", "su", "utempter"])`, Tell: "{process.program} opened {file.path} to write"},
	{Name: "history-write", Doc: "the history of a shell is opened to write by another program", On: []string{Open}, Severity: "medium", Mitre: []string{"T1070.003"},
		If: `file.write && file.path.matches("/\\.(bash|zsh|ash|python)_history$") && !(process.name in ` + shells + `) && !process.name.startsWith("python")`, Tell: "{process.program} opened {file.path} to write"},
}

// Builtin returns shunt's own rules, prepared, including rules that are off unless a file enables them.
func Builtin() []Rule {
	all := slices.Concat(execution, privilege, kernels, files)
	for i := range all {
		all[i].Action = Alert
		if _, err := all[i].Prepare(); err != nil {
			panic("rule " + all[i].Name + ": " + err.Error()) // a test prepares all rules
		}
	}
	return all
}
