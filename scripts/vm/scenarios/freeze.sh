# a snapshot with the file system on the volume's block device frozen, and gone back to
# timeout: 200
# needs: longhorn controller
modprobe ublk_drv
device=/dev/longhorn/vol
start_controller tgt-blockdev --replica "local:$work/local"
[ -b "$device" ] || fail "$device is no block device"
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
