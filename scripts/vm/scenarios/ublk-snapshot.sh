# snapshots of a mounted file system under load: frozen ones mount as they are, others after the journal
# timeout: 300
# needs: dbs attach
fresh_store
start_server
dbs --quiet volume create v 512MiB
attach v --queues 2
main=$device
mkfs.ext4 -q "$main"
mkdir -p /mnt/v /mnt/s
mount "$main" /mnt/v
random_file /mnt/v/before 4
(cd /mnt/v && md5sum before) >"$work/before"
sync

# Runs until it is told to end; an error ends it, with another code than 0.
fio --name=load --eta=never --directory=/mnt/v --size=24m --rw=randrw --bs=4k --ioengine=psync --fsync=16 --verify=crc32c \
    --verify_backlog=32 --verify_fatal=1 --time_based --runtime=600 --output="$work/fio.log" &
load=$!
until_true 60 "fio's file" test -s /mnt/v/load.0.0

for n in 1 2 3; do
    sleep 1
    fsfreeze --freeze /mnt/v
    dbs --quiet snapshot create "v@frozen$n"
    fsfreeze --unfreeze /mnt/v
    sleep 1
    dbs --quiet snapshot create "v@running$n"
done
kill -0 $load || fail "fio has ended"
ok "6 snapshots under load"

for n in 1 2 3; do
    attach "v@frozen$n"
    # Clean: nothing is to be replayed, and a read-only device would not let it be.
    e2fsck -fn "$device" >"$work/e2fsck.log" 2>&1
    mount -o ro "$device" /mnt/s
    (cd /mnt/s && md5sum -c "$work/before" >/dev/null)
    umount /mnt/s
    detach "v@frozen$n"
done
ok "frozen snapshots are clean and mount read-only, while the load goes on"

for n in 1 2 3; do
    dbs --quiet volume clone "v@running$n" "c$n"
    attach "c$n"
    e2fsck -p "$device" >"$work/e2fsck.log" 2>&1 || [ $? -eq 1 ]
    e2fsck -fn "$device" >"$work/e2fsck.log" 2>&1
    mount "$device" /mnt/s
    (cd /mnt/s && md5sum -c "$work/before" >/dev/null)
    umount /mnt/s
    detach "c$n"
    dbs --quiet volume delete "c$n" --yes
done
ok "clones of the others are sound after their journal"

end_fio $load
umount /mnt/v
e2fsck -fn "$main" >"$work/e2fsck.log" 2>&1
detach v
end_server TERM
check_store
ok "the volume itself is clean, dbs check"
