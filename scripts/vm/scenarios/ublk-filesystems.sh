# ext4 and XFS on a ublk device: made, filled by fio with verification, checked, and gone after detaching
# timeout: 300
# needs: dbs attach
# quick
fresh_store
start_server

# round KIND MKFS... : a volume of its own
round() {
    local kind=$1
    shift
    dbs --quiet volume create "$kind" 512MiB
    attach "$kind" --queues 2
    "$@" "$device"
    mkdir -p "/mnt/$kind"
    mount "$device" "/mnt/$kind"
    ok "$kind made and mounted"
    # Buffered, with syncs in between; what was written is read back at the end.
    verified "$kind" --directory="/mnt/$kind" --size=16m --rw=randwrite --bs=4k --ioengine=psync --fsync=64
    verified "$kind" --directory="/mnt/$kind" --size=32m --rw=write --bs=256k --ioengine=io_uring --direct=1
    random_file "$work/data" 8
    cp "$work/data" "/mnt/$kind/data"
    umount "/mnt/$kind"
    case $kind in
    ext4) e2fsck -fn "$device" >"$work/fsck.log" 2>&1 ;;
    xfs) xfs_repair -n "$device" >"$work/fsck.log" 2>&1 ;;
    esac
    ok "$kind is clean after fio with verification"
    detach "$kind"
    # Through another device and an empty page cache.
    attach "$kind" --read-only --depth 16
    mount -o ro "$device" "/mnt/$kind"
    cmp "$work/data" "/mnt/$kind/data"
    umount "/mnt/$kind"
    detach "$kind"
    ok "$kind after detaching, read-only: the same"
}

round ext4 mkfs.ext4 -q
round xfs mkfs.xfs -q -f
end_server TERM
check_store
ok "dbs check"
