# disks over vhost-user from a server on the host: requests, ext4, discard, resize, a snapshot, kill -9 under I/O
# timeout: 480
# rounds: 5
# by name only
hand=
for port in /sys/class/virtio-ports/*; do
    if [ "$(cat "$port/name" 2>/dev/null)" = hand ]; then
        hand=/dev/${port##*/}
    fi
done
[ -n "$hand" ] || fail "scripts/vm/vhost-user.sh starts this one, with a server on the host"
exec 7<>"$hand"

# host COMMAND: has it done there; what came of it.
host() {
    local answer
    echo "$*" >&7
    read -r answer <&7
    [ "${answer#failed}" = "$answer" ] || fail "the host: $answer"
    echo "$answer"
}

# disk COMMAND SPEC: sets `device`, by the name that the guest is told.
disk() {
    local uuid found
    uuid=$(host dbs --json "$1" show "$2" | jq -er .uuid | tr -d -)
    for found in /sys/block/vd*; do
        if [ "$(cat "$found/serial" 2>/dev/null)" = "${uuid:0:20}" ]; then
            device=/dev/${found##*/}
            return
        fi
    done
    fail "no disk is called ${uuid:0:20}"
}
disk snapshot base@s
snapshot=$device
disk volume raw
raw=$device
disk volume fs
fs=$device
queue=/sys/block/${fs##*/}/queue
is() {
    local found
    found=$(cat "$1")
    [ "$found" = "$2" ] || fail "$1 is $found, not $2"
}
is "$queue/write_cache" "write back"
is "$queue/logical_block_size" 512
is "$queue/physical_block_size" 4096
[ "$(cat "$queue/discard_max_bytes")" -gt 0 ] || fail "no discard"
[ "$(cat "$queue/write_zeroes_max_bytes")" -gt 0 ] || fail "no write-zeroes"
[ "$(find "/sys/block/${fs##*/}/mq" -mindepth 1 -maxdepth 1 | wc -l)" -eq 2 ] || fail "not 2 queues"
ok "names, queues, write cache, blocks, discard, write-zeroes"

[ "$(md5sum <"$snapshot" | cut -d' ' -f1)" = "$(host sum | cut -d' ' -f1)" ] || fail "the snapshot"
is "/sys/block/${snapshot##*/}/ro" 1
must_fail dd if=/dev/zero of="$snapshot" bs=4k count=1 oflag=direct
ok "a snapshot is read, and not written"

verified raw --filename="$raw" --size=8m --rw=randwrite --bsrange=512-64k --blockalign=512 --ioengine=io_uring --iodepth=32 --direct=1
verified raw --filename="$raw" --offset=16m --size=16m --rw=write --bs=1m --ioengine=libaio --iodepth=4 --direct=1 --fsync=2
ok "writes of 512 bytes to 1 MiB, 32 at a time, and flushes"
random_file "$work/a" 4
dd if="$work/a" of="$raw" bs=1M seek=40 oflag=direct conv=fsync 2>/dev/null
blkdiscard --zeroout --offset $((41 << 20)) --length $((1 << 20)) "$raw"
blkdiscard --offset $((42 << 20)) --length $((1 << 20)) "$raw"
head -c $((2 << 20)) /dev/zero | dd of="$work/a" bs=1M seek=1 conv=notrunc 2>/dev/null
dd if="$raw" of="$work/b" bs=1M skip=40 count=4 iflag=direct 2>/dev/null
cmp "$work/a" "$work/b"
ok "discard and write-zeroes read as zeros, and nothing beside them is touched"

mkfs.ext4 -q "$fs"
mkdir -p /mnt/fs
mount -o errors=panic "$fs" /mnt/fs
sync
fstrim /mnt/fs
used() {
    host dbs --json info | jq -er .allocated
}
empty=$(used)
random_file /mnt/fs/data 64
sync
[ "$(used)" -ge $((empty + (60 << 20))) ] || fail "64 MiB written, allocated from $empty to $(used)"
rm /mnt/fs/data
sync
fstrim /mnt/fs
freed() {
    [ "$(used)" -le $((empty + (16 << 20))) ]
}
until_true 30 "space after fstrim" freed
ok "ext4 made, filled, trimmed: the store has its space back"

host dbs --quiet volume resize fs 192MiB
grown() {
    [ "$(blockdev --getsize64 "$fs")" -eq $((192 << 20)) ]
}
until_true 10 "the disk's new size" grown
resize2fs "$fs" >"$work/grow.log" 2>&1
random_file /mnt/fs/behind 140
sum=$(md5sum </mnt/fs/behind)
sync
echo 3 >/proc/sys/vm/drop_caches
[ "$(md5sum </mnt/fs/behind)" = "$sum" ] || fail "what is behind the old end"
rm /mnt/fs/behind
ok "the mounted disk has grown, and ext4 with it"

survives_kills host kill

# As a reboot does: the driver lets go of the disk, and begins anew.
virtio=$(basename "$(realpath "/sys/block/${fs##*/}/device")")
echo "$virtio" >/sys/bus/virtio/drivers/virtio_blk/unbind
echo "$virtio" >/sys/bus/virtio/drivers/virtio_blk/bind
disk volume fs
mount "$device" /mnt/fs
md5sum -c "$work/sums" >/dev/null
cp "$work/sums" /mnt/fs/sums
umount /mnt/fs
exec 7>&-
ok "the driver begins anew: the same files"
