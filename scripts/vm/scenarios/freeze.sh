# a snapshot with the file system on the volume's block device frozen, and gone back to; its controller killed meanwhile
# timeout: 400
# needs: longhorn controller
modprobe ublk_drv
device=/dev/longhorn/vol
start_controller tgt-blockdev --replica "local:$work/local"
[ -b "$device" ] || fail "$device is no block device"
[ "$(stat -c '%u %g' "$device")" = "0 0" ] || fail "$device is others', too"
mkfs.ext4 -q "$device"
mkdir -p /mnt/v
mount "$device" /mnt/v
random_file "$work/data" 2
cp "$work/data" /mnt/v/data
# In memory still, most of it.
[ "$(steer snapshot create one --freeze-fs)" = one ] || fail "no snapshot"
! grep -q event=not-frozen "$controller_log" || fail "it was not frozen"
timeout 30 cp "$work/data" /mnt/v/late || fail "it is frozen still"
rm /mnt/v/data
sync
umount /mnt/v
ok "a file system is frozen, and thawed again"

steer frontend shutdown
steer snapshot revert one
steer frontend start tgt-blockdev
# Nothing is to be replayed: it was whole.
e2fsck -f -n "$device" >"$work/fsck" 2>&1 || fail "$(cat "$work/fsck")"
mount "$device" /mnt/v
cmp "$work/data" /mnt/v/data || fail "the file is another one"
[ ! -e /mnt/v/late ] || fail "what came later is in the snapshot"
umount /mnt/v
[ "$(steer snapshot create two --freeze-fs)" = two ] || fail "no snapshot without a file system"
grep -q event=not-frozen "$controller_log" || fail "there was something to freeze"
end_controller TERM
ok "what was written before the snapshot is in it, whole"

ports=(--replica tcp://127.0.0.1:10000 --replica tcp://127.0.0.1:10010)
# again SIGNAL: the controller gets it, its replicas die, and there is a new one.
again() {
    end_controller "$1"
    for name in a b; do
        end_replica $name KILL
    done
    start_replica a 10000
    start_replica b 10010
    start_controller tgt-blockdev "${ports[@]}"
    grep -q event=taken_over "$controller_log" || fail "the device is another one"
}
start_replica a 10000
start_replica b 10010
start_controller tgt-blockdev "${ports[@]}"
mkfs.ext4 -q "$device"
mount "$device" /mnt/v
freeze_as_killed /mnt/v "$device"
again KILL
not_frozen /mnt/v
grep -q event=thawed "$controller_log" || fail "it was thawed by nobody"
timeout 30 cp "$work/data" /mnt/v/data
ok "a file system that a killed controller had frozen: the next one thaws it"

fsfreeze --freeze /mnt/v
again KILL
again HUP
fsfreeze --unfreeze /mnt/v || fail "it was thawed"
cmp "$work/data" /mnt/v/data
umount /mnt/v
end_controller TERM
end_replica a TERM
end_replica b TERM
ok "what somebody else has frozen stays frozen when the device is taken over"
