# an encrypted volume as a block device: when its server is killed, what writers ask waits until the volume is unlocked again
# timeout: 240
# needs: dbs attach, dbs volume unlock
fresh_store
head -c 32 /dev/urandom >"$work/key"
head -c 32 /dev/urandom >"$work/other"
start_server
dbs --quiet volume create vault 128MiB --encrypt --key-file "$work/key"
attach vault
mkfs.ext4 -q "$device"
mkdir -p /mnt/vault
mount -o errors=panic "$device" /mnt/vault
random_file "$work/data" 8
cp "$work/data" /mnt/vault/first
sync
dbs --quiet snapshot create vault@s
must_fail dbs volume lock vault
ok "ext4 on it; it is not locked under its users"

state_is() {
    json '.[] | select(.snapshot == null) | .state' attached | grep -qx "$1"
}
end_server KILL
start_server
cp "$work/data" /mnt/vault/second && sync /mnt/vault/second &
writer=$!
state_is waiting || fail "$(dbs attached)"
must_fail dbs volume unlock vault --key-file "$work/other"
# The file's pages may be written to nothing but the device.
sleep 2
kill -0 $writer || fail "the file was synced, and nobody has the key"
dbs --quiet volume unlock vault --key-file "$work/key"
wait $writer || fail "the writer saw an error"
until_true 60 "the server to take the device over" state_is live
echo 3 >/proc/sys/vm/drop_caches
cmp "$work/data" /mnt/vault/first
cmp "$work/data" /mnt/vault/second
ok "killed: the writer waits while the volume is locked, and goes on when it is unlocked"

end_server KILL
DBS_VOLUME_KEY_FILE=$work/key start_server
cp "$work/data" /mnt/vault/third
sync
until_true 60 "the server to take the device over" state_is live
umount /mnt/vault
e2fsck -fn "$device" >"$work/e2fsck.log" 2>&1
detach vault
end_server TERM
ok "a server with the secret needs nobody; ext4 is clean"

start_server
must_fail dbs attach vault
grep -q 'is locked' "$work/must_fail.log" || fail "$(cat "$work/must_fail.log")"
dbs --quiet volume unlock vault --key-file "$work/key"
attach vault@s
mount -o ro,noload "$device" /mnt/vault
cmp "$work/data" /mnt/vault/first
umount /mnt/vault
detach vault@s
dbs --quiet volume lock vault
end_server TERM
check_store
ok "its snapshot shows what was written; dbs check"
