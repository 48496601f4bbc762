# a volume over two replicas as a block device: ext4 on it under fio, its controller killed and taken over
# timeout: 240
# needs: longhorn controller
# quick
modprobe ublk_drv
ports=(--replica tcp://127.0.0.1:10000 --replica tcp://127.0.0.1:10010)
start_replica a 10000
start_replica b 10010
start_controller tgt-blockdev "${ports[@]}" --reactors 2 --frontend-depth 64
device=/dev/longhorn/vol
[ -b "$device" ] || fail "$device is no block device"
[ "$(steer info | jq -r '.endpoint + " " + .frontend + " " + .frontendState')" = "$device tgt-blockdev up" ] || fail "its endpoint"
[ "$(blockdev --getsize64 "$device")" -eq "$volume_bytes" ] || fail "its size"
ok "a block device with the volume's name and size"

blkdiscard --offset $((32 << 20)) --length $((1 << 20)) "$device"
blkdiscard --zeroout --offset $((33 << 20)) --length $((1 << 20)) "$device"
mkfs.ext4 -q "$device"
mkdir -p /mnt/v
mount -o errors=panic "$device" /mnt/v
random_file "$work/data" 3
cp "$work/data" /mnt/v/data
sync
ok "discarded, zeroed, ext4 made and mounted"

# flushes: how many the replicas have been asked for.
flushes() {
    steer journal
    until_true 30 "the journal" eval 'grep -q " [RWU]\[" "$controller_log"'
    grep -c -- "->tcp://127.0.0.1:100[01]0 F\[" "$controller_log" || true
}
before=$(flushes)
dd if=/dev/zero of=/mnt/v/synced bs=4k count=1 oflag=direct conv=fsync 2>/dev/null
until_true 30 "a flush of both replicas" eval '[ "$(flushes)" -ge $((before + 2)) ]'
rm /mnt/v/synced
ok "a flush reaches the replicas"

verified load --directory=/mnt/v --size=3m --rw=randwrite --bs=4k --direct=1 --ioengine=io_uring --iodepth=16 --loops=2 &
load=$!
until_true 30 "fio's file" test -s /mnt/v/load.0.0
sleep 1
end_controller KILL
# What is open belongs to a controller: a manager starts replicas anew. They hold what was acknowledged.
end_replica a KILL
end_replica b KILL
start_replica a 10000
start_replica b 10010
start_controller tgt-blockdev "${ports[@]}" --reactors 2
grep -q event=taken_over "$controller_log" || fail "the device is another one"
wait $load || fail "fio"
cmp "$work/data" /mnt/v/data
ok "kill -9 of the controller and both replicas: a pause, and fio read back all it wrote"

# A replica that missed something may not go on with the device.
end_replica b KILL
dd if="$work/data" of=/mnt/v/more bs=64k oflag=direct 2>/dev/null
[ "$(steer ls-replica | grep -c ERR)" -eq 1 ] || fail "the dead replica is not ERR"
umount /mnt/v
end_controller KILL
end_replica a TERM
start_replica a 10000
start_replica b 10010
start_controller tgt-blockdev "${ports[@]}"
grep -q event=not-taken-over "$controller_log" || fail "a device is taken over with a replica that missed something"
[ -b "$device" ] || fail "no new device"
steer frontend shutdown
[ ! -e "$device" ] || fail "$device is still there"
[ "$(find /sys/class/block -name 'ublkb*' | wc -l)" -eq 0 ] || fail "a device is left"
end_controller TERM
ok "a replica that missed something is not believed: the device ends"

start_controller ublk --replica tcp://127.0.0.1:10000
e2fsck -fn "$device" >"$work/e2fsck.log" 2>&1
mount -o ro "$device" /mnt/v
cmp "$work/data" /mnt/v/data
cmp "$work/data" /mnt/v/more
umount /mnt/v
end_controller TERM
end_replica a TERM
end_replica b TERM
ok "the complete replica alone: ext4 is clean, the files are the same"
