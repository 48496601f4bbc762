# what the kernel is told of a ublk device, every kind of request on it, and the errors of dbs attach
# timeout: 240
# needs: dbs attach
# quick
fresh_store
start_server
dbs --quiet volume create v 96MiB
attach v --queues 2 --depth 64
queue=/sys/block/${device##*/}/queue
is "$queue/write_cache" "write back"
is "$queue/fua" 1
is "$queue/rotational" 0
is "$queue/physical_block_size" 4096
[ "$(cat "$queue/discard_max_bytes")" -gt 0 ] || fail "no discard"
[ "$(cat "$queue/write_zeroes_max_bytes")" -gt 0 ] || fail "no write-zeroes"
[ "$(find "/sys/block/${device##*/}/mq" -mindepth 1 -maxdepth 1 | wc -l)" -eq 2 ] || fail "not 2 queues"
[ "$(blockdev --getsize64 "$device")" -eq $((96 << 20)) ] || fail "its size"
[ "$(realpath "/dev/dbs/vda/v")" = "$device" ] || fail "its link"
ok "queues, write cache, FUA, discard, write-zeroes, size and link"

verified raw --filename="$device" --size=8m --rw=randwrite --bsrange=512-64k --blockalign=512 --ioengine=io_uring --iodepth=32 --direct=1
verified raw --filename="$device" --offset=16m --size=16m --rw=write --bs=1m --ioengine=libaio --iodepth=4 --direct=1 --sync=dsync
ok "writes of 512 bytes to 1 MiB, 32 at a time, with FUA"

# flushed TEXT COMMAND...: it sends a flush to the store's disk before it has ended.
flushed() {
    local before text=$1
    before=$(awk '{ print $16 }' "/sys/block/${DBS_STORE##*/}/stat")
    shift
    "$@" >"$work/flushed.log" 2>&1
    [ "$(awk '{ print $16 }' "/sys/block/${DBS_STORE##*/}/stat")" -gt "$before" ] || fail "$text: no flush reached the store's disk"
}
is "/sys/block/${DBS_STORE##*/}/queue/write_cache" "write back"
for place in allocating "in place"; do
    flushed "a flush, $place" dd if=/dev/zero of="$device" bs=4k count=1 seek=20000 oflag=direct conv=notrunc,fsync
done
flushed "FUA" fio --name=fua --filename="$device" --offset=80m --size=4k --rw=write --bs=4k --direct=1 --ioengine=psync --sync=dsync
ok "flush and FUA reach the disk of the store"

random_file "$work/a" 4
dd if="$work/a" of="$device" bs=1M seek=64 oflag=direct conv=fsync 2>/dev/null
blkdiscard --zeroout --offset $((65 << 20)) --length $((1 << 20)) "$device"
blkdiscard --offset $((66 << 20)) --length $((1 << 20)) "$device"
head -c $((2 << 20)) /dev/zero | dd of="$work/a" bs=1M seek=1 conv=notrunc 2>/dev/null
dd if="$device" of="$work/b" bs=1M skip=64 count=4 iflag=direct 2>/dev/null
cmp "$work/a" "$work/b"
ok "discard and write-zeroes read as zeros, and nothing beside them is touched"

# The same content by another way: the export over NBD.
dd if="$device" bs=1M iflag=direct 2>/dev/null | md5sum >"$work/by-ublk"
dbs volume export v - 2>/dev/null | md5sum >"$work/by-export"
cmp "$work/by-ublk" "$work/by-export"
ok "dbs volume export gives the same bytes"

# Attached once more: the same device. In use: it stays.
[ "$(json .device attach v --queues 2 --depth 64)" = "$device" ] || fail "attached twice"
# Found by review: that made the server forget the device that has the number.
dbs --quiet volume create w 8MiB
must_fail dbs attach w --id "${device##*/ublkb}"
dbs --json attached | grep -q "\"$device\"" || fail "the device with the number is forgotten"
mkfs.ext4 -q "$device"
mkdir -p /mnt/v
mount "$device" /mnt/v
must_fail dbs detach v
grep -q " /mnt/v " /proc/mounts
umount /mnt/v
must_fail dbs attach nosuch
must_fail dbs attach v@nosuch
dbs --quiet snapshot create v@s
attach v@s
must_fail dd if=/dev/zero of="$device" bs=4k count=1 oflag=direct
detach v@s
detach v
must_fail dbs detach v
ok "attached twice, in use, unknown, taken: as they should be"

# works true|false: what preflight says of dbs attach; its exit code is 0 whatever it finds.
works() {
    local found
    found=$(json '.ways[] | select(.name == "attach") | .works | tostring' preflight)
    [ "$found" = "$1" ] || fail "dbs preflight says that attaching works: $found"
}
works true
end_server TERM
rmmod ublk_drv
works false
modprobe ublk_drv
ok "dbs preflight tells whether the driver is there"
check_store
