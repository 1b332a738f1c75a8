package baseline

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// object is a file of a fixture: a link if target is not empty.
type object struct {
	content string
	mode    os.FileMode
	target  string
}

// fixture is a small Debian, by paths without the first slash.
type fixture map[string]object

func lines(all ...string) string { return strings.Join(all, "\n") + "\n" }

var goodPackages = []string{"base-files", "auditd", "rsyslog", "unattended-upgrades", "openssh-server"}

func installed(names ...string) string {
	var b strings.Builder
	for _, name := range names {
		fmt.Fprintf(&b, "Package: %s\nStatus: install ok installed\nVersion: 1\n\n", name)
	}
	return b.String() + "Package: telnetd\nStatus: deinstall ok config-files\nVersion: 1\n\n"
}

// good is a system that every item passes.
func good() fixture {
	f := fixture{}
	file := func(mode os.FileMode, name string, text ...string) {
		f[name] = object{content: lines(text...), mode: mode}
	}
	file(0o600, "etc/ssh/sshd_config", "# the server", "Include /etc/ssh/sshd_config.d/*.conf", "PermitRootLogin no", "PermitEmptyPasswords no", "HostbasedAuthentication no",
		"IgnoreRhosts yes", "UsePAM yes", "MaxAuthTries 4", "LoginGraceTime 60", "ClientAliveInterval 300", "ClientAliveCountMax 3", "Ciphers aes256-gcm@openssh.com,aes256-ctr",
		"MACs hmac-sha2-512", "KexAlgorithms curve25519-sha256", "PermitUserEnvironment no", "LogLevel VERBOSE", "X11Forwarding no", "Match User backup", "\tX11Forwarding no")
	file(0o600, "etc/ssh/sshd_config.d/10-own.conf", "Port 22")
	file(0o600, "etc/ssh/ssh_host_ed25519_key", "key")
	file(0o644, "etc/login.defs", "# shadow", "PASS_MAX_DAYS\t365", "PASS_MIN_DAYS\t1", "PASS_WARN_AGE\t7", "ENCRYPT_METHOD YESCRYPT", "LOGIN_RETRIES\t\t5", "LOGIN_TIMEOUT 60", "UMASK\t\t027")
	file(0o644, "etc/passwd", "root:x:0:0:root:/root:/bin/bash", "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin", "sync:x:4:65534:sync:/bin:/bin/sync", "ada:x:1000:1000:,,,:/home/ada:/bin/bash")
	file(0o640, "etc/shadow", "root:$y$j9T$a$b:19800:0:365:7:::", "daemon:*:19800:0:99999:7:::", "sync:*:19800:0:99999:7:::", "ada:$6$a$b:19800:1:365:7:::")
	file(0o644, "etc/group", "root:x:0:", "daemon:x:1:", "shadow:x:42:", "nogroup:x:65534:", "ada:x:1000:")
	file(0o640, "etc/gshadow", "root:*::", "shadow:*::")
	file(0o644, "etc/pam.d/common-auth", "auth required pam_faillock.so preauth", "auth\t[success=1 default=ignore]\tpam_unix.so", "auth\trequisite\tpam_deny.so")
	file(0o644, "etc/pam.d/common-password", "password requisite pam_pwquality.so retry=3", "password required pam_pwhistory.so remember=5 use_authtok",
		"password\t[success=1 default=ignore]\tpam_unix.so obscure yescrypt", "password requisite pam_deny.so")
	file(0o644, "etc/pam.d/su", "auth sufficient pam_rootok.so", "auth required pam_wheel.so use_uid", "@include common-auth")
	file(0o644, "usr/lib/x86_64-linux-gnu/security/pam_pwquality.so", "elf")
	file(0o644, "etc/security/pwquality.conf", "minlen = 12", "minclass = 3")
	file(0o644, "etc/security/faillock.conf", "deny = 5", "unlock_time = 900")
	file(0o644, "etc/security/limits.conf", "* hard core 0")
	file(0o600, "etc/security/opasswd", "")
	file(0o644, "etc/profile", "TMOUT=900")
	file(0o600, "etc/crontab", "# m h")
	for _, when := range []string{"d", "hourly", "daily", "weekly", "monthly"} {
		f["etc/cron."+when] = object{mode: os.ModeDir | 0o700}
	}
	file(0o440, "etc/sudoers", "Defaults env_reset", "Defaults use_pty", "root ALL=(ALL:ALL) ALL", "@includedir /etc/sudoers.d")
	f["etc/sudoers.d"] = object{mode: os.ModeDir | 0o750}
	file(0o600, "boot/grub/grub.cfg", "menu")
	f["root"] = object{mode: os.ModeDir | 0o700}
	f["home/ada"] = object{mode: os.ModeDir | 0o750}
	file(0o644, "etc/fstab", "# fstab", "UUID=1 / ext4 defaults 0 1", "tmpfs /tmp tmpfs nodev,nosuid,noexec 0 0", "tmpfs\t/dev/shm\ttmpfs\tnodev,nosuid,noexec\t0 0", "UUID=2 /var/tmp ext4 nodev,nosuid,noexec 0 2", "UUID=3 /home ext4 nodev,nosuid 0 2")
	file(0o644, "var/lib/dpkg/status", installed(goodPackages...))
	file(0o644, "usr/lib/systemd/system/auditd.service", "[Service]", "[Install]", "WantedBy=multi-user.target")
	for _, name := range []string{"avahi-daemon.service", "cups.service", "rpcbind.service"} {
		file(0o644, "usr/lib/systemd/system/"+name, "[Install]", "WantedBy=multi-user.target")
	}
	f["lib"] = object{target: "usr/lib"}
	f["etc/systemd/system/multi-user.target.wants/auditd.service"] = object{target: "/lib/systemd/system/auditd.service"}
	file(0o644, "etc/systemd/journald.conf", "[Journal]", "Storage=persistent", "Compress=yes")
	file(0o644, "etc/systemd/coredump.conf", "[Coredump]", "Storage=none")
	file(0o640, "etc/audit/auditd.conf", "max_log_file_action = keep_logs", "space_left_action = syslog")
	file(0o640, "etc/audit/rules.d/audit.rules", "-w /etc/passwd -p wa -k id", "-w /etc/shadow -p wa -k id", "-w /etc/group -p wa -k id", "-w /etc/sudoers -p wa -k id", "-w /etc/localtime -p wa -k id",
		"-a always,exit -F arch=b64 -S adjtimex,settimeofday,clock_settime -k time", "-a always,exit -F arch=b64 -S init_module,finit_module -k modules")
	f["var/log/audit"] = object{mode: os.ModeDir | 0o750}
	file(0o644, "etc/sysctl.d/99-own.conf", "kernel.randomize_va_space = 2", "kernel.dmesg_restrict=1", "kernel/kptr_restrict = 2", "kernel.yama.ptrace_scope = 1", "net.ipv4.conf.all.accept_redirects = 0",
		"net.ipv6.conf.all.accept_redirects = 0", "net.ipv4.conf.all.accept_source_route = 0", "net.ipv4.conf.all.send_redirects = 0", "net.ipv4.conf.all.rp_filter = 1", "net.ipv4.tcp_syncookies = 1",
		"fs.protected_hardlinks = 1", "fs.protected_symlinks = 1", "net.ipv4.conf.all.log_martians = 1", "fs.suid_dumpable = 0")
	return f
}

// folder is a folder of the test's own, in memory if possible: fix syncs every step, and a busy disk takes seconds for
// that.
func folder(t testing.TB) string {
	t.Helper()
	parent := "/dev/shm"
	if info, err := os.Stat(parent); err != nil || !info.IsDir() {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(parent, "shunt-baseline-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// build makes the files below a folder of the test's own.
func (f fixture) build(t testing.TB) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: the files of a system are root's")
	}
	root := folder(t)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, o := range f {
		full := filepath.Join(root, name)
		must(os.MkdirAll(filepath.Dir(full), 0o755))
		switch {
		case o.target != "":
			must(os.Symlink(o.target, full))
		case o.mode.IsDir():
			must(os.MkdirAll(full, 0o755))
			must(os.Chmod(full, o.mode.Perm()))
		default:
			must(os.WriteFile(full, []byte(o.content), 0o600))
			must(os.Chmod(full, o.mode))
		}
	}
	return root
}

// edit replaces a text that must be there.
func (f fixture) edit(name, old, now string) {
	o := f[name]
	if !strings.Contains(o.content, old) {
		panic(name + " has no " + old)
	}
	o.content = strings.Replace(o.content, old, now, 1)
	f[name] = o
}

func (f fixture) chmod(name string, mode os.FileMode) {
	o := f[name]
	o.mode = o.mode&os.ModeDir | mode
	f[name] = o
}
