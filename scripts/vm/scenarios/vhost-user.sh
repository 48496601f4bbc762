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

# On the store of the host.
dbs() {
    host dbs "$@"
}

# disk COMMAND SPEC: sets `device`, by the name that the guest is told.
disk() {
    local uuid found
    uuid=$(json .uuid "$1" show "$2" | tr -d -)
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

works_as_a_disk
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
