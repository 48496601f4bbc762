# what scenario vhost-user has left, after a reboot
# timeout: 60
# by name only
found=
mkdir -p /mnt/fs
for disk in /dev/vd[c-z]; do
    if [ "$(blockdev --getsize64 "$disk")" -eq $((192 << 20)) ]; then
        found=$disk
    fi
done
[ -n "$found" ] || fail "scripts/vm/vhost-user.sh starts this one"
e2fsck -fn "$found" >"$work/e2fsck.log" 2>&1
mount -o ro "$found" /mnt/fs
md5sum -c /mnt/fs/sums >/dev/null
umount /mnt/fs
ok "the files of the boot before"
