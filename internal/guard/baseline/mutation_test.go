package baseline

import "strings"

// mutations change one setting each of a system that passes all; the item of that name, and no other, fails then.
var mutations = func() map[string]func(fixture) {
	all := map[string]func(fixture){}
	edit := func(id, file, old, now string) { all[id] = func(f fixture) { f.edit(file, old, now) } }
	for id, is := range map[string][2]string{
		"ssh-root-login": {"PermitRootLogin no", "permitrootlogin = prohibit-password # why"}, "ssh-empty-passwords": {"PermitEmptyPasswords no", "PermitEmptyPasswords yes"},
		"ssh-host-based": {"HostbasedAuthentication no", "HostbasedAuthentication yes"}, "ssh-ignore-rhosts": {"IgnoreRhosts yes", "IgnoreRhosts no"},
		"ssh-uses-pam": {"UsePAM yes\n", ""}, "ssh-max-auth-tries": {"MaxAuthTries 4\n", ""}, "ssh-login-grace": {"LoginGraceTime 60", "LoginGraceTime 2m"},
		"ssh-idle-interval": {"ClientAliveInterval 300", "ClientAliveInterval 0"}, "ssh-idle-count": {"ClientAliveCountMax 3", "ClientAliveCountMax 30"},
		"ssh-ciphers": {"aes256-ctr", "aes256-ctr,3des-cbc"}, "ssh-macs": {"hmac-sha2-512", "hmac-md5,hmac-sha2-512"},
		"ssh-key-exchange": {"curve25519-sha256", "+diffie-hellman-group1-sha1,curve25519-sha256"}, "ssh-permit-environment": {"PermitUserEnvironment no", "PermitUserEnvironment yes"},
		"ssh-log-level": {"LogLevel VERBOSE", "LogLevel QUIET"}, "ssh-x11": {"X11Forwarding no\nMatch", "X11Forwarding yes\nMatch"},
	} {
		edit(id, "etc/ssh/sshd_config", is[0], is[1])
	}
	for id, is := range map[string][2]string{
		"login-pass-max-days": {"PASS_MAX_DAYS\t365", "PASS_MAX_DAYS\t99999"}, "login-pass-min-days": {"PASS_MIN_DAYS\t1", "PASS_MIN_DAYS\t0"},
		"login-pass-warn-age": {"PASS_WARN_AGE\t7", "PASS_WARN_AGE\t1"}, "login-encrypt-method": {"YESCRYPT", "MD5"}, "login-retries": {"\t\t5", "\t\t50"},
		"login-timeout": {"LOGIN_TIMEOUT 60", "LOGIN_TIMEOUT 600"}, "login-umask": {"027", "022"},
	} {
		edit(id, "etc/login.defs", is[0], is[1])
	}
	for id, is := range map[string][2]string{
		"accounts-shadowed": {"daemon:x", "daemon:*"}, "accounts-unique-uid": {"daemon:x:1:", "daemon:x:4:"}, "accounts-unique-name": {"daemon:", "sync:"},
		"accounts-no-network": {"ada:", "+::::::\nada:"}, "accounts-one-root": {"ada:x:1000:1000", "ada:x:00:1000"}, "accounts-root-group": {"root:x:0:0", "root:x:0:1"},
		"accounts-system-shells": {"/usr/sbin/nologin", "/bin/sh"}, "groups-exist": {"ada:x:1000:1000", "ada:x:1000:1001"},
	} {
		edit(id, "etc/passwd", is[0], is[1])
	}
	all["accounts-one-root"] = func(f fixture) {
		f.edit("etc/passwd", "ada:x:1000:1000", "ada:x:0:1000")
		f.edit("etc/passwd", "root:x:0:0:root:/root:/bin/bash\n", "") // or two accounts would have one id
	}
	for id, is := range map[string][2]string{"groups-unique-id": {"daemon:x:1:", "daemon:x:1:\nother:x:01:"}, "groups-unique-name": {"daemon:x:1:", "daemon:x:1:\ndaemon:x:7:"}, "groups-shadow-empty": {"shadow:x:42:", "shadow:x:42:ada"}} {
		edit(id, "etc/group", is[0], is[1])
	}
	for id, is := range map[string][2]string{"accounts-empty-password": {"daemon:*", "daemon:"}, "accounts-strong-hash": {"$6$a$b", "$1$a$b"}, "accounts-expire": {":1:365:", ":1:99999:"}} {
		edit(id, "etc/shadow", is[0], is[1])
	}
	edit("pam-no-nullok", "etc/pam.d/common-auth", "pam_unix.so", "pam_unix.so nullok try_first_pass # as it was")
	edit("pam-faillock", "etc/pam.d/common-auth", " preauth", "")
	edit("pam-quality", "etc/pam.d/common-password", "password requisite pam_pwquality.so retry=3\n", "")
	edit("pam-history", "etc/pam.d/common-password", "remember=5", "remember=2")
	edit("su-wheel", "etc/pam.d/su", "auth required pam_wheel.so use_uid\n", "")
	edit("password-length", "etc/security/pwquality.conf", "minlen = 12\n", "")
	edit("password-classes", "etc/security/pwquality.conf", "minclass = 3", "minclass=1")
	edit("lock-after-failures", "etc/security/faillock.conf", "deny = 5", "deny = 50")
	edit("lock-time", "etc/security/faillock.conf", "unlock_time = 900", "unlock_time = 60")
	edit("limits-core", "etc/security/limits.conf", "* hard", "* soft")
	edit("shell-timeout", "etc/profile", "TMOUT=900", "export TMOUT=9000; readonly TMOUT")
	for id, name := range map[string]string{"mode-passwd": "etc/passwd", "mode-group": "etc/group", "mode-shadow": "etc/shadow", "mode-gshadow": "etc/gshadow", "mode-sshd-config": "etc/ssh/sshd_config.d/10-own.conf",
		"mode-ssh-keys": "etc/ssh/ssh_host_ed25519_key", "mode-crontab": "etc/crontab", "mode-cron-folders": "etc/cron.daily", "mode-sudoers": "etc/sudoers", "mode-boot-loader": "boot/grub/grub.cfg",
		"mode-root-home": "root", "mode-audit-log": "var/log/audit", "mode-old-passwords": "etc/security/opasswd"} {
		all[id] = func(f fixture) { f.chmod(name, 0o666) }
	}
	all["sudo-asks"] = func(f fixture) {
		f["etc/sudoers.d/own"] = object{content: "ada ALL=(ALL) NOPASSWD: ALL\n", mode: 0o440}
	}
	edit("sudo-pty", "etc/sudoers", "Defaults use_pty\n", "")
	edit("mount-tmp", "etc/fstab", "/tmp tmpfs nodev,nosuid,noexec", "/tmp tmpfs noexec,nosuid,nodev,exec")
	edit("mount-dev-shm", "etc/fstab", "/dev/shm\ttmpfs\tnodev,nosuid,noexec", "/dev/shm\ttmpfs\tnodev")
	edit("mount-var-tmp", "etc/fstab", "/var/tmp ext4 nodev,nosuid,noexec", "/var/tmp ext4 nodev,nosuid,noexec,defaults")
	edit("mount-home", "etc/fstab", "/home ext4 nodev,nosuid", "/home ext4 rw")
	all["no-hosts-equiv"] = func(f fixture) { f["home/ada/.rhosts"] = object{content: "+ +\n", mode: 0o644} }
	all["no-stored-passwords"] = func(f fixture) { f["root/.netrc"] = object{content: "machine a\n", mode: 0o600} }
	without := func(id, name string) {
		edit(id, "var/lib/dpkg/status", "Package: "+name+"\nStatus: install", "Package: "+name+"\nStatus: deinstall ok not-installed\nWas: ")
	}
	without("audit-package", "auditd")
	without("log-package", "rsyslog")
	without("updates-unattended", "unattended-upgrades")
	for id, name := range map[string]string{"no-telnet-server": "telnetd-ssl", "no-rsh-server": "rsh-server", "no-ftp-server": "vsftpd", "no-tftp-server": "tftpd-hpa", "no-nis": "nis", "no-talk": "talkd"} {
		all[id] = func(f fixture) {
			f["var/lib/dpkg/status"] = object{content: installed(append([]string{name}, goodPackages...)...), mode: 0o644}
		}
	}
	const wants = "etc/systemd/system/multi-user.target.wants/"
	all["audit-service"] = func(f fixture) { delete(f, wants+"auditd.service") }
	for id, name := range map[string]string{"no-avahi": "avahi-daemon.service", "no-cups": "cups.service", "no-rpcbind": "rpcbind.service"} {
		all[id] = func(f fixture) { f[wants+name] = object{target: "/usr/lib/systemd/system/" + name} }
	}
	edit("journal-persistent", "etc/systemd/journald.conf", "Storage=persistent\n", "")
	edit("journal-compressed", "etc/systemd/journald.conf", "Compress=yes", "Compress=no")
	edit("coredump-storage", "etc/systemd/coredump.conf", "[Coredump]\nStorage=none", "[Other]\nStorage=none")
	edit("audit-file-action", "etc/audit/auditd.conf", "keep_logs", "ignore")
	edit("audit-space-left", "etc/audit/auditd.conf", "syslog", "ignore")
	for _, name := range []string{"passwd", "shadow", "group", "sudoers", "localtime"} {
		edit("audit-rule-"+name, "etc/audit/rules.d/audit.rules", "-w /etc/"+name+" -p wa", "-w /etc/"+name+" -p r")
	}
	edit("audit-rule-time", "etc/audit/rules.d/audit.rules", ",clock_settime", "")
	edit("audit-rule-modules", "etc/audit/rules.d/audit.rules", "init_module,finit_module", "delete_module")
	for _, line := range strings.Split(strings.TrimSpace(good()["etc/sysctl.d/99-own.conf"].content), "\n") {
		key, _, _ := strings.Cut(line, "=")
		for id, name := range sysctlItems {
			if sysctlKey(strings.TrimSpace(key)) == name {
				edit(id, "etc/sysctl.d/99-own.conf", line, strings.TrimSpace(key)+" = 7")
			}
		}
	}
	return all
}()

var sysctlItems = map[string]string{
	"sysctl-aslr": "kernel.randomize_va_space", "sysctl-dmesg": "kernel.dmesg_restrict", "sysctl-kptr": "kernel.kptr_restrict", "sysctl-ptrace": "kernel.yama.ptrace_scope",
	"sysctl-redirects": "net.ipv4.conf.all.accept_redirects", "sysctl-redirects6": "net.ipv6.conf.all.accept_redirects", "sysctl-source-route": "net.ipv4.conf.all.accept_source_route",
	"sysctl-send-redirects": "net.ipv4.conf.all.send_redirects", "sysctl-rp-filter": "net.ipv4.conf.all.rp_filter", "sysctl-syncookies": "net.ipv4.tcp_syncookies", "sysctl-hardlinks": "fs.protected_hardlinks",
	"sysctl-symlinks": "fs.protected_symlinks", "sysctl-martians": "net.ipv4.conf.all.log_martians", "sysctl-suid-dumpable": "fs.suid_dumpable",
}
