# volumes as block devices over iSCSI: tgtd and the kernel's initiator; grown, not handed over, controller and tgtd killed
# timeout: 480
# needs: longhorn controller, tgtadm
modules=/vm/iscsi
while read -r module; do
    insmod "$modules/$module.ko" 2>/dev/null || true
done <"$modules/modules"
ip addr add 10.9.8.7/32 dev lo
mkdir -p /run/lock/iscsi /var/run /var/log /var/lib/iscsi
# It ends its whole process group.
setsid iscsid -f >"$work/iscsid.log" 2>&1 </dev/null &
iscsid=$!
mkdir -p /mnt/v
device=/dev/longhorn/vol

# session: whether the initiator has one with the volume's target.
session() {
    iscsiadm -m session 2>/dev/null | grep -q ' iqn.2019-10.io.longhorn:vol'
}

# upgrade FRONTEND PORT: a newer controller, over the replicas at 10100 and 10110.
upgrade() {
    longhorn controller vol --frontend "$1" --size "$volume_bytes" --current-size "$volume_bytes" --disableRevCounter \
        --upgrade --listen "127.0.0.1:$2" --replica tcp://127.0.0.1:10100 --replica tcp://127.0.0.1:10110
}

# While there is the file, tgtadm removes no target.
tgtadm_fails=$work/tgtadm-fails
tgtadm=$(command -v tgtadm)
mv "$tgtadm" "$tgtadm.real"
cat >"$tgtadm" <<EOF
#!/bin/sh
case "\$*" in *"--op delete --mode target"*) [ ! -e $tgtadm_fails ] || exit 22 ;; esac
exec $tgtadm.real "\$@"
EOF
chmod 755 "$tgtadm"

start_replica a 10000
start_replica b 10010
start_controller tgt-blockdev --replica tcp://127.0.0.1:10000 --replica tcp://127.0.0.1:10010 --block-device iscsi
grep -q 'durability=power' "$controller_log" || fail "its durability"
[ -b "$device" ] || fail "$device is no block device"
[ "$(stat -c '%a %u %g' "$device")" = "660 0 6" ] || fail "its rights"
[ "$(steer info | jq -r '.endpoint + " " + .frontend + " " + .blockDevice')" = "$device tgt-blockdev iscsi" ] || fail "its info"
[ "$(blockdev --getsize64 "$device")" -eq "$volume_bytes" ] || fail "its size"
disk=$(iscsiadm -m session -P 3 | sed -n 's/.*Attached scsi disk \([a-z]*\).*/\1/p')
[ "$(cat "/sys/class/block/$disk/device/timeout")" = 122 ] || fail "the timeout of $disk"
[ "$(cat "/sys/class/block/$disk/queue/write_cache")" = "write through" ] || fail "the write cache of $disk"
[ "$(cat "/sys/class/block/$disk/queue/discard_max_bytes")" -gt 0 ] || fail "no discards on $disk"
ok "a disk with the volume's name, size and settings"

mkfs.ext4 -q "$device"
mount -o errors=panic "$device" /mnt/v
random_file "$work/data" 3
cp "$work/data" /mnt/v/data
sync
[ "$(steer snapshot create one --freeze-fs)" = one ] || fail "no snapshot"
! grep -q event=not-frozen "$controller_log" || fail "it was not frozen"
verified load --directory=/mnt/v --size=3m --rw=randwrite --bs=4k --direct=1 --ioengine=io_uring --iodepth=16 --loops=2 &
load=$!
until_true 30 "fio's file" test -s /mnt/v/load.0.0
bigger=$((volume_bytes + (32 << 20)))
steer expand --size $bigger
until_true 60 "the new size" eval '[ "$(blockdev --getsize64 $device)" -eq $bigger ]'
resize2fs "$device" >"$work/resize.log" 2>&1
volume_bytes=$bigger
ok "ext4 on it, frozen for a snapshot, and grown under fio"

# From here on the kernel has ublk, which a newer controller must not give to users of another device.
modprobe ublk_drv
# As a manager does: newer processes on the same directories, then the newer controller. It is refused, and users notice
# nothing.
old=("${replica[a]}" "${replica[b]}")
start_replica a 10100
start_replica b 10110
for frontend in tgt-blockdev ublk tgt-iscsi nbd; do
    must_fail upgrade $frontend 9502
    grep -q 'Detach the volume, upgrade its engine' "$work/must_fail.log" || fail "another reason: $(cat "$work/must_fail.log")"
done
must_fail longhorn controller vol --frontend tgt-blockdev --size "$volume_bytes" --disableRevCounter --listen 127.0.0.1:9502 \
    --replica tcp://127.0.0.1:10000
kill -0 "$load" || fail "fio has ended: $(cat "$work/fio.log")"
session || fail "the session is gone"
end_replica a TERM
end_replica b TERM
replica=([a]=${old[0]} [b]=${old[1]})
wait $load || fail "fio: $(cat "$work/fio.log")"
cmp "$work/data" /mnt/v/data
umount /mnt/v
e2fsck -fn "$device" >"$work/e2fsck.log" 2>&1 || fail "$(cat "$work/e2fsck.log")"
ok "an upgrade is refused, and costs the older controller and its users nothing"

# What a dead controller leaves, the next one removes.
mount "$device" /mnt/v
end_controller KILL
end_replica a KILL
end_replica b KILL
session || fail "the session ended by itself"
dd if=/mnt/v/data of=/dev/null iflag=direct bs=4k count=1 2>/dev/null && fail "who answered that?"
umount -l /mnt/v
start_replica a 10000
start_replica b 10010
start_controller tgt-blockdev --replica tcp://127.0.0.1:10000 --replica tcp://127.0.0.1:10010 --block-device iscsi
session || fail "no session"
e2fsck -fp "$device" >"$work/e2fsck.log" 2>&1 || [ $? -eq 1 ] || fail "$(cat "$work/e2fsck.log")"
mount "$device" /mnt/v
cmp "$work/data" /mnt/v/data
umount /mnt/v
ok "kill -9 of all: errors, then a new device with all that was acknowledged"

# As nobody has anything of it any more, the next one may be of another kind.
end_controller KILL
end_replica a KILL
end_replica b KILL
start_replica a 10000
start_replica b 10010
start_controller tgt-blockdev --replica tcp://127.0.0.1:10000 --replica tcp://127.0.0.1:10010
[ "$(steer info | jq -r .blockDevice)" = ublk ] || fail "not of ublk: $(steer info)"
! session || fail "a session is left"
[ "$(tgtadm --lld iscsi --op show --mode target)" = "" ] || fail "a target is left"
mount "$device" /mnt/v
cmp "$work/data" /mnt/v/data
umount /mnt/v
end_controller TERM
start_controller tgt-blockdev --replica tcp://127.0.0.1:10000 --replica tcp://127.0.0.1:10010 --block-device iscsi
ok "after a dead controller ublk takes the place of iSCSI, and leaves nothing of it"

# A target that cannot be removed, and another volume's disk that gets the number of the one that is gone.
number() {
    stat -c %t:%T "$1"
}
before=$(number "$device")
: >"$tgtadm_fails"
must_fail steer frontend shutdown
[ ! -e "$device" ] || fail "$device has outlived its disk"
must_fail steer frontend start tgt-blockdev
rm "$tgtadm_fails"
longhorn --volume-name two replica "$work/replica-two" --size "$volume_bytes" --disableRevCounter --listen 127.0.0.1:10020 \
    --sync-agent-port-count 2 >"$work/two.log" 2>&1 </dev/null &
two=($!)
until_true 90 "the second replica" grep -q event=ready "$work/two.log"
longhorn controller two --frontend tgt-blockdev --size "$volume_bytes" --current-size "$volume_bytes" --disableRevCounter \
    --block-device iscsi --listen 127.0.0.1:9503 --replica tcp://127.0.0.1:10020 >"$work/two-controller.log" 2>&1 </dev/null &
two+=($!)
until_true 60 "the second volume" grep -q event=ready "$work/two-controller.log"
[ "$(number /dev/longhorn/two)" = "$before" ] || fail "the second disk has another number than the first had: nothing is shown"
[ ! -e "$device" ] || fail "$device leads to the disk of another volume"
steer frontend shutdown
steer frontend start tgt-blockdev
[ "$(number "$device")" != "$(number /dev/longhorn/two)" ] || fail "two nodes of one disk"
printf two | dd of=/dev/longhorn/two conv=fsync 2>/dev/null
mount "$device" /mnt/v
cmp "$work/data" /mnt/v/data
umount /mnt/v
ok "a node never outlives its disk: the next disk of its number is another volume's"

# tgtd dies: with it the targets of all volumes, and no session.
kill -KILL "$(pidof tgtd)"
start_replica c 10030
must_fail longhorn controller vol --frontend tgt-blockdev --size "$volume_bytes" --disableRevCounter --upgrade --listen 127.0.0.1:9502 \
    --replica tcp://127.0.0.1:10030
end_replica c TERM
session || fail "an upgrade has ended the session"
steer frontend shutdown
! session || fail "a session is left"
steer frontend start tgt-blockdev
mount "$device" /mnt/v
cmp "$work/data" /mnt/v/data
longhorn --url http://127.0.0.1:9503 --volume-name two frontend shutdown
longhorn --url http://127.0.0.1:9503 --volume-name two frontend start tgt-blockdev
[ "$(dd if=/dev/longhorn/two bs=3 count=1 2>/dev/null)" = two ] || fail "the second volume"
ok "tgtd killed: an upgrade is refused, and a new start of the frontends is all that is needed"

# Who froze a file system is gone, and nobody could unmount it.
fsfreeze --freeze /mnt/v
steer frontend shutdown
grep -q event=thawed "$controller_log" || fail "it was not thawed"
umount /mnt/v
kill -TERM "${two[1]}"
wait "${two[1]}" || fail "the second controller"
kill -TERM "${two[0]}"
wait "${two[0]}" || true
[ ! -e "$device" ] || fail "$device is still there"
! session || fail "a session is left"
[ "$(tgtadm --lld iscsi --op show --mode target)" = "" ] || fail "a target is left"
ok "a frozen file system does not outlive its device"

# Told to go by SIGHUP, as by a manager whose newer engine is one of Longhorn's.
end_controller TERM
end_replica a TERM
end_replica b TERM
start_replica a 10000
start_replica b 10010
start_controller tgt-blockdev --replica tcp://127.0.0.1:10000 --replica tcp://127.0.0.1:10010 --block-device iscsi
mount "$device" /mnt/v
end_controller HUP
umount -l /mnt/v

end_replica a KILL
end_replica b KILL
start_replica a 10000
start_replica b 10010
start_controller tgt-blockdev --replica tcp://127.0.0.1:10000 --replica tcp://127.0.0.1:10010 --block-device iscsi
steer frontend shutdown
steer frontend start tgt-blockdev
[ -b "$device" ] || fail "no device after a second start"
end_controller TERM
[ ! -e "$device" ] || fail "$device is still there"
! session || fail "a session is left"
end_replica a TERM
end_replica b TERM
ok "nothing is left in the end"
kill "$iscsid"
# The tgtd that a controller started.
kill "$(pidof tgtd)"
