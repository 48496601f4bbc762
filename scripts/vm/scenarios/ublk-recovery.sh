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

kill_server() {
    end_server KILL
    start_server
}
survives_kills kill_server

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
