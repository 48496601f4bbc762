# trim through file systems gives the store its space back
# timeout: 240
# needs: dbs attach
fresh_store
start_server

# trimmed KIND MKFS...
trimmed() {
    local kind=$1 empty full after
    shift
    dbs --quiet volume create "$kind" 512MiB
    attach "$kind"
    "$@" "$device"
    mkdir -p "/mnt/$kind"
    mount "$device" "/mnt/$kind"
    sync
    fstrim "/mnt/$kind"
    empty=$(allocated)
    random_file "/mnt/$kind/data" 96
    sync
    full=$(allocated)
    [ "$full" -ge $((empty + (90 << 20))) ] || fail "96 MiB written, allocated went from $empty to $full"
    rm "/mnt/$kind/data"
    sync
    fstrim "/mnt/$kind"
    # Freed after the next commit.
    until_true 30 "space after fstrim" freed $((empty + (16 << 20)))
    after=$(allocated)
    umount "/mnt/$kind"
    detach "$kind"
    ok "$kind: allocated $((empty >> 20)), full $((full >> 20)), after fstrim $((after >> 20)) MiB"
}

freed() {
    [ "$(allocated)" -le "$1" ]
}

trimmed ext4 mkfs.ext4 -q
trimmed xfs mkfs.xfs -q -f

dbs --quiet volume create raw 256MiB
attach raw
before=$(allocated)
random_file "$work/data" 64
dd if="$work/data" of="$device" bs=1M oflag=direct 2>/dev/null
blkdiscard "$device"
until_true 30 "space after blkdiscard" freed "$before"
detach raw
ok "blkdiscard of a whole device"
end_server TERM
check_store
ok "dbs check"
