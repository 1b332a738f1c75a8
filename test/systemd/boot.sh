#!/bin/sh
# Runs in the machine's root before systemd does: a machine whose guard was enabled before a restart, and three units that write to
# a protected file. Each leaves the word "written" or "refused" in /run/attempt.NAME.
set -eu
set -- /packages/*_amd64.deb
dpkg -i "$1"
mkdir -p /srv/data /srv/more
echo kept >/srv/data/f
echo kept >/srv/more/f
cat >/etc/shunt/guard.yaml <<EOF
guard: {self: true, protect: [{name: data, paths: [/srv/data], deny: [write, create, delete], mode: deny}]}
EOF
chmod 600 /etc/shunt/guard.yaml
systemctl enable shunt-guard

cat >/usr/local/bin/attempt <<'EOF'
#!/bin/sh
if (echo "$1" >>/srv/data/f); then word=written; else word=refused; fi
echo "$word" >"/run/attempt.$1.new"
mv "/run/attempt.$1.new" "/run/attempt.$1"
EOF
chmod 755 /usr/local/bin/attempt

# unit NAME [LINE...]: a service whose section [Unit] has these lines.
unit() {
	name=$1
	shift
	{
		printf '[Unit]\n'
		printf '%s\n' "$@"
		printf '[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/usr/local/bin/attempt %s\n' "$name"
		printf '[Install]\nWantedBy=multi-user.target\n'
	} >"/etc/systemd/system/$name.service"
	systemctl enable "$name"
}
# The control, which shows that an attempt can succeed: it is ordered before the guard.
unit before DefaultDependencies=no Before=shunt-guard.service
# As early as a unit can be that is after sysinit.target.
unit early DefaultDependencies=no After=sysinit.target Before=basic.target
unit ordinary
