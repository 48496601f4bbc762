# ext4 over NBD with the kernel's client; kill -9 of the server amid writes loses nothing that was synced
# timeout: 200
# quick
# With ioctl: a device configured over netlink waits for ever for requests whose server has died.
connect() {
    nbd-client -nonetlink -unix "$socket" /dev/nbd0 -name v >"$work/nbd-client.log" 2>&1
}

# Writes files and syncs each, until that fails; what is recorded was synced.
writer() {
    local n
    for n in $(seq 10000); do
        head -c $((n * 977 % 60000 + 1)) /dev/urandom >"/mnt/v/$n" || return 0
        sync "/mnt/v/$n" || return 0
        (cd /mnt/v && md5sum "$n") >>"$work/synced" || return 0
    done
}

fresh_store
dbs --quiet volume create v 512MiB
modprobe nbd
mkdir -p /mnt/v

start_server
connect
mkfs.ext4 -q /dev/nbd0
mount /dev/nbd0 /mnt/v
ok "mkfs.ext4 and mount"

writer 2>/dev/null &
writing=$!
until_true 60 "40 synced files" eval '[ "$(grep -c . "$work/synced")" -ge 40 ]'
end_server KILL
wait $writing
umount /mnt/v
nbd-client -d /dev/nbd0 >/dev/null 2>&1 || true
ok "kill -9 after $(wc -l <"$work/synced") synced files"

start_server
connect
# 1: the journal was replayed.
e2fsck -p /dev/nbd0 >"$work/e2fsck.log" || [ $? -eq 1 ]
e2fsck -fn /dev/nbd0 >"$work/e2fsck.log" 2>&1
ok "e2fsck finds nothing after the journal"
mount /dev/nbd0 /mnt/v
(cd /mnt/v && md5sum -c "$work/synced" >/dev/null)
ok "every synced file is as written"
fstrim /mnt/v
umount /mnt/v
nbd-client -d /dev/nbd0 >/dev/null
end_server TERM
check_store
ok "dbs check"
