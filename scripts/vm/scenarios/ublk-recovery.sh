# kill -9 of the server, again and again, under verified writes and a mounted file system: a pause, and no error
# timeout: 480
# rounds: 20
# needs: dbs attach
# quick
fresh_store
start_server
dbs --quiet volume create raw 64MiB
dbs --quiet volume create fs 256MiB
attach fs
fs=$device
attach raw --queues 2
raw=$device
mkfs.ext4 -q "$fs"
mkdir -p /mnt/fs
mount -o errors=panic "$fs" /mnt/fs

# Writes files and syncs each; an error ends it.
writer() {
    local n
    trap - ERR EXIT
    for n in $(seq 100000); do
        [ ! -e "$work/enough" ] || return 0
        head -c $((n * 977 % 40000 + 1)) /dev/urandom >"/mnt/fs/$((n % 200))" && sync "/mnt/fs/$((n % 200))" || return 1
        echo "$n" >"$work/written"
    done
}
writer 2>"$work/writer.log" &
writing=$!

for round in $(seq $rounds); do
    fio --name=round --eta=never --filename="$raw" --size=12m --rw=randwrite --bsrange=4k-64k --direct=1 --ioengine=io_uring \
        --iodepth=16 --verify=crc32c --verify_fatal=1 --randseed="$round" --output="$work/fio.log" &
    load=$!
    # Another moment of the run each time.
    sleep "$(awk -v n="$round" 'BEGIN { srand(n); print 0.8 + rand() }')"
    end_server KILL
    start_server
    wait $load || fail "fio, round $round"
    kill -0 $writing || fail "the writer saw an error in round $round"
done
ok "$rounds rounds of kill -9: fio read back all it wrote, the writer went on"

touch "$work/enough"
wait $writing
before=$(cat "$work/written")
[ "$before" -gt $rounds ] || fail "only $before files were written"
if dmesg | grep -E 'I/O error|EXT4-fs error|Buffer I/O'; then
    fail "the kernel saw errors"
fi
md5sum /mnt/fs/[0-9]* >"$work/sums"
umount /mnt/fs
e2fsck -fn "$fs" >"$work/e2fsck.log" 2>&1
mount "$fs" /mnt/fs
md5sum -c "$work/sums" >/dev/null
umount /mnt/fs
ok "$before files written and synced meanwhile; the kernel saw no error, ext4 is clean"
# Found by review: what a server had acknowledged and lost was told to nobody, and the next fsync succeeded.
fio --name=lost --eta=never --filename="$raw" --offset=32m --size=1m --rw=write --bs=64k --direct=1 --ioengine=io_uring \
    --output="$work/fio.log"
end_server KILL
rm -f /run/dbs/*.tail /dev/shm/dbs-0/*.tail
start_server
for device in "$raw" "$fs"; do
    if sync "$device" 2>>"$work/sync.log"; then
        fail "fsync of $device succeeded, and what was written before may be lost"
    fi
    sync "$device"
done
ok "the tail is gone: the next fsync fails, the one behind it succeeds"

detach fs
detach raw
end_server TERM
check_store
ok "dbs check"
