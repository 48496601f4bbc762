# a mounted volume grows, and ext4 and XFS with it: at once where the kernel can (6.16), else when attached again
# timeout: 300
# needs: dbs attach
fresh_store
start_server

device_size() {
    [ "$(blockdev --getsize64 "$device")" -eq "$1" ]
}

# grown KIND MKFS...
grown() {
    local kind=$1 before more after how=online
    shift
    dbs --quiet volume create "$kind" 384MiB
    attach "$kind"
    "$@" "$device"
    mkdir -p "/mnt/$kind"
    mount "$device" "/mnt/$kind"
    random_file "/mnt/$kind/data" 8
    before=$(md5sum <"/mnt/$kind/data")
    dbs --quiet volume resize "$kind" 1GiB
    # The server tells the kernel before it answers, and says in its log if it could not.
    if grep "event=resized device=$device error=" "$server_log" >/dev/null; then
        how="after attaching again"
        device_size $((384 << 20))
        random_file "/mnt/$kind/data2" 8
        umount "/mnt/$kind"
        detach "$kind"
        attach "$kind"
        mount "$device" "/mnt/$kind"
    fi
    until_true 10 "the device's new size" device_size $((1 << 30))
    case $kind in
    ext4) resize2fs "$device" >"$work/grow.log" 2>&1 ;;
    xfs) xfs_growfs "/mnt/$kind" >"$work/grow.log" 2>&1 ;;
    esac
    after=$(($(stat -f -c '%b * %S' "/mnt/$kind")))
    [ "$after" -gt $((900 << 20)) ] || fail "$kind has $after bytes only"
    # Behind the old end.
    random_file "/mnt/$kind/more" 400
    more=$(md5sum <"/mnt/$kind/more")
    umount "/mnt/$kind"
    mount "$device" "/mnt/$kind"
    [ "$(md5sum <"/mnt/$kind/data")" = "$before" ] || fail "$kind: the old data"
    [ "$(md5sum <"/mnt/$kind/more")" = "$more" ] || fail "$kind: the new data"
    umount "/mnt/$kind"
    detach "$kind"
    ok "$kind grew $how; what is behind the old end is read back"
}

grown ext4 mkfs.ext4 -q
grown xfs mkfs.xfs -q -f
end_server TERM
check_store
ok "dbs check"
