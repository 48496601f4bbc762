# the store on a device that is slow, fails or loses power: who asked is told, and what was flushed is there
# timeout: 480
# needs: dbs attach
# dmsetup makes the nodes itself: there is no udev.
export DM_DISABLE_UDEV=1
modprobe dm-mod
modprobe dm-flakey
modprobe dm-delay
sectors=$(blockdev --getsz /dev/vda)
linear="0 $sectors linear /dev/vda 0"
dmsetup create faulty --table "$linear"
DBS_STORE=/dev/mapper/faulty
[ -b "$DBS_STORE" ] || fail "there is no $DBS_STORE"

# becomes TABLE: what the device does from now on.
becomes() {
    dmsetup suspend --noflush --nolockfs faulty
    dmsetup load faulty --table "$1"
    dmsetup resume faulty
}

# end_and_forget: kill -9, and the memory of this boot is lost as well.
end_and_forget() {
    end_server KILL
    find /dev/shm /run -name '*.tail' -exec rm -f {} +
}

fresh_store
start_server
dbs --quiet volume create v 256MiB
attach v --queues 2

# Slow: 40 ms for reads, 60 ms for writes and flushes.
becomes "0 $sectors delay /dev/vda 0 40 /dev/vda 0 60"
verified slow --filename="$device" --size=4m --rw=randrw --bs=16k --iodepth=16 --ioengine=io_uring --direct=1 --fsync=32
becomes "$linear"
ok "with 40 to 60 ms for each request fio reads back what it wrote"

# Failing, all of it: requests fail, the store is poisoned, and what was flushed before is there.
verified before --filename="$device" --size=16m --rw=randwrite --bs=8k --iodepth=16 --ioengine=io_uring --direct=1 \
    --end_fsync=1 --verify_only=0
becomes "0 $sectors flakey /dev/vda 0 0 3600"
must_fail dd if=/dev/zero of="$device" bs=64k count=16 seek=512 oflag=direct conv=fsync
must_fail dd if="$device" of=/dev/null bs=64k count=16 iflag=direct
# What a failed flush had made durable nobody knows: it is the last one.
must_fail sync "$device"
becomes "$linear"
must_fail dd if=/dev/zero of="$device" bs=64k count=16 seek=512 oflag=direct conv=fsync
dd if="$device" of=/dev/null bs=64k count=16 iflag=direct 2>/dev/null
must_fail dbs volume create w 1MiB
grep -q 'open the store again' "$work/must_fail.log" || fail "nobody says what to do"
ok "on a device that fails requests fail, and afterwards reads go on, writes do not, and it is said why"
end_server TERM
start_server
until_true 30 "the device again" dd if="$device" of=/dev/null bs=4k count=1 iflag=direct
fio --name=before --eta=never --filename="$device" --size=16m --rw=randwrite --bs=8k --iodepth=16 --ioengine=io_uring --direct=1 \
    --verify=crc32c --verify_fatal=1 --verify_only --randrepeat=1 --output="$work/fio.log"
dd if=/dev/zero of="$device" bs=64k count=16 seek=512 oflag=direct conv=fsync 2>/dev/null
ok "opened again, it has all that was flushed, and takes writes"

# Power lost: whatever comes is acknowledged and nowhere. The file system on it is one over NBD, which
# ends with the server: over ublk it would wait, and remember what the device has lost.
detach v
dbs --quiet volume create fs 256MiB
modprobe nbd
mkdir -p /mnt/fs

connect() {
    nbd-client -nonetlink -unix "$socket" /dev/nbd0 -name fs >"$work/nbd-client.log" 2>&1
}

# synced_files_are_there: with what is in them.
synced_files_are_there() {
    (cd /mnt/fs && md5sum -c "$work/sums" >"$work/md5sum.log" 2>&1) || fail "a synced file is not what it was"
}

connect
mkfs.ext4 -q /dev/nbd0
: >"$work/sums"
for round in 1 2 3 4; do
    mount /dev/nbd0 /mnt/fs
    for n in $(seq 30); do
        head -c $((n * 977 % 60000 + 1)) /dev/urandom >"/mnt/fs/$round-$n"
        sync "/mnt/fs/$round-$n"
        (cd /mnt/fs && md5sum "$round-$n") >>"$work/sums"
    done
    becomes "0 $sectors flakey /dev/vda 0 0 3600 1 drop_writes"
    for n in $(seq 20); do
        head -c 100000 /dev/urandom >"/mnt/fs/lost-$n"
        sync "/mnt/fs/lost-$n" || true
    done
    end_and_forget
    umount /mnt/fs
    nbd-client -d /dev/nbd0 >/dev/null 2>&1 || true
    becomes "$linear"
    start_server
    connect
    e2fsck -p /dev/nbd0 >"$work/e2fsck.log" 2>&1 || [ $? -eq 1 ] || fail "e2fsck -p"
    e2fsck -fn /dev/nbd0 >"$work/e2fsck.log" 2>&1
    mount /dev/nbd0 /mnt/fs
    synced_files_are_there
    umount /mnt/fs
done
nbd-client -d /dev/nbd0 >/dev/null 2>&1
ok "4 power losses: all $(wc -l <"$work/sums") synced files are there, ext4 is clean after its journal"
end_server TERM
check_store
dmsetup remove faulty
ok "dbs check"
