#!/usr/bin/env bash
# guest.sh: in the virtual machine of boot.sh, as a service: installs /root/dbs_*.deb, has systemd run its units, and looks
# after the next boot whether all is there. Prints `boot passed` if so; ends the machine in any case.
set -Eeuo pipefail
export LC_ALL=C.UTF-8
data=/srv/data socket=/run/dbs/other.nbd.sock

ok() {
    printf '  ok  %s (%s s)\n' "$*" "$(cut -d. -f1 /proc/uptime)"
}

fail() {
    trap - ERR
    echo "FAILED: $*"
    systemctl --failed --no-legend --plain || true
    journalctl -b --no-pager -n 60 -o cat || true
    sleep 1
    poweroff -ff
}
trap 'fail "exit code $? of: $BASH_COMMAND"' ERR

# must_fail COMMAND...
must_fail() {
    if "$@" >/root/must_fail.log 2>&1; then
        fail "succeeded, and must not: $*"
    fi
}

is() {
    local found
    found=$(systemctl show --value -p "$2" "$1")
    [ "$found" = "$3" ] || fail "$1: $2 is $found, not $3"
}

# becomes_active UNIT: a client is served a moment before systemd is told that the unit has started.
becomes_active() {
    timeout 300 sh -c "until systemctl -q is-active $1; do sleep 0.2; done" || is "$1" ActiveState active
}

first() {
    local pid

    # What docs/install.md says, in the shell of somebody who types it.
    begun=$EPOCHREALTIME
    cd /root
    bash -ex from-nothing.sh >from-nothing.log 2>&1 || fail "$(cat from-nothing.log)"
    ok "from apt install to a mounted file system and its snapshot, in $(awk "BEGIN { print $EPOCHREALTIME - $begun }") s"
    id dbs >/dev/null
    mountpoint -q $data
    dbs --store /var/lib/dbs/main.dbs snapshot list data | grep -q monday
    is dbs@main Type notify
    is dbs@main SubState running
    [ "$(stat -c %a /run/dbs)" = 700 ]
    ok "dbs@main serves, dbs-attach@main attaches, fstab mounts by the device's name"

    export DBS_STORE=/var/lib/dbs/main.dbs
    head -c 20M /dev/urandom >$data/file
    sync
    dbs snapshot create data@first
    sha256sum $data/file >/root/sum
    pid=$(systemctl show --value -p MainPID dbs@main)
    dpkg -i /root/dbs_*.deb >/root/upgrade.log
    grep -q 'systemctl restart dbs@main.service' /root/upgrade.log
    is dbs@main MainPID "$pid"
    ok "an upgrade leaves the server alone, and says so"
    # Somebody writes meanwhile.
    (for i in $(seq 40); do dd if=$data/file of="$data/copy$((i % 2))" bs=1M count=1 conv=fsync status=none || exit 1; done) &
    writer=$!
    systemctl restart dbs@main
    must_fail test "$(systemctl show --value -p MainPID dbs@main)" = "$pid"
    kill -KILL "$(systemctl show --value -p MainPID dbs@main)"
    wait $writer
    is dbs@main NRestarts 1
    is dbs-attach@main ActiveState active
    sha256sum -c --status /root/sum
    ok "restarted, and killed, under a mounted file system: its writers wait"

    mkdir /srv/backups
    printf 'DBS_BACKUP=data vfs:///srv/backups\nDBS_PRUNE=vfs:///srv/backups --keep-last 2\n' >/etc/dbs/main-backup.conf
    systemctl start dbs-backup@main
    dbs backup list vfs:///srv/backups | grep -q data || fail "no backup: $(dbs backup list vfs:///srv/backups)"
    ok "dbs-backup@main"

    dbs --quiet init /var/lib/dbs/other.dbs --size 1GiB
    dbs --quiet --store /var/lib/dbs/other.dbs volume create v 16MiB
    printf 'DBS_STORE=/var/lib/dbs/other.dbs\nDBS_SERVE=--user dbs\n' >/etc/dbs/other.conf
    systemctl enable --now dbs@other.socket
    is dbs@other ActiveState inactive
    [ "$(stat -c %a $socket)" = 600 ]
    nbdinfo --size "nbd+unix:///v?socket=$socket" >/dev/null
    becomes_active dbs@other
    [ "$(stat -c %U "/proc/$(systemctl show --value -p MainPID dbs@other)")" = dbs ]
    head -c 16M /dev/urandom >/root/v
    nbdcopy /root/v "nbd+unix:///v?socket=$socket"
    # While nobody listens but systemd, the next client waits.
    systemctl stop dbs@other
    nbdcopy "nbd+unix:///v?socket=$socket" /root/v.read
    cmp /root/v /root/v.read
    becomes_active dbs@other
    ok "dbs@other.socket starts the server for its first client, as the user dbs"

    # A server that systemd gives the key of its volumes (docs/security.md).
    head -c 32 /dev/urandom >/root/vault.key
    dbs --quiet --store /var/lib/dbs/other.dbs volume create vault 16MiB --encrypt --key-file /root/vault.key
    mkdir /etc/systemd/system/dbs@other.service.d
    printf '[Service]\nLoadCredential=vault.key:/root/vault.key\nEnvironment=DBS_VOLUME_KEY_FILE=%%d/vault.key\n' \
        >/etc/systemd/system/dbs@other.service.d/key.conf
    systemctl daemon-reload
    dbs --quiet --store /var/lib/dbs/other.dbs volume lock vault
    must_fail nbdcopy /root/v "nbd+unix:///vault?socket=$socket"
    systemctl restart dbs@other
    nbdcopy /root/v "nbd+unix:///vault?socket=$socket"
    nbdcopy "nbd+unix:///vault?socket=$socket" /root/v.read
    cmp /root/v /root/v.read
    ok "an encrypted volume, by a credential of systemd"

    exec 5<$data/file
    must_fail dpkg --remove dbs
    grep -q 'still attached as block devices' /root/must_fail.log
    sha256sum -c --status /root/sum
    exec 5<&-
    systemctl reset-failed
    systemctl start dbs-attach@main srv-data.mount
    ok "the package is not removed under a file system in use"
}

second() {
    # Nothing waits for it at boot.
    timeout 600 sh -c "until mountpoint -q $data || systemctl -q is-failed srv-data.mount; do sleep 1; done" || true
    mountpoint -q $data || fail "$data is not mounted"
    sha256sum -c --status /root/sum
    is dbs@main SubState running
    is dbs@other ActiveState inactive
    [ -z "$(systemctl --failed --no-legend --plain)" ]
    nbdcopy "nbd+unix:///v?socket=$socket" /root/v.read
    cmp /root/v /root/v.read
    ok "after a boot: the file system is mounted, nothing has failed"

    dpkg --remove dbs
    must_fail mountpoint -q $data
    dpkg --purge dbs
    [ -s /var/lib/dbs/main.dbs ] && [ -s /var/lib/dbs/other.dbs ] && [ -s /etc/dbs/main.conf ]
    [ -z "$(systemctl list-units --plain --no-legend 'dbs*')" ] || fail "$(systemctl list-units 'dbs*')"
    ok "removed: it is unmounted, detached and stopped; stores and configuration stay"
    dpkg -i /root/dbs_*.deb >/dev/null
    dbs --store /var/lib/dbs/main.dbs --quiet check
    systemctl start dbs-attach@main
    mount /dev/dbs/main.dbs/data $data
    sha256sum -c --status /root/sum
    ok "installed again: all is there"
}

if [ -e /root/sum ]; then
    second
else
    first
fi
echo "boot passed"
sync
systemctl --no-block poweroff
