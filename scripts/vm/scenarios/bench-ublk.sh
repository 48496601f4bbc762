# speed of a volume as a ublk device against the same volume over NBD, kernel loop and null_blk, and of the frontends alone
# timeout: 600
# needs: dbs attach, longhorn controller
# by name only
modprobe ublk_drv
modprobe nbd
modprobe loop
modprobe null_blk nr_devices=1 gb=1 bs=4096 submit_queues=2
fresh_store
start_server
# Two, so that no way has its data in the other's page cache; both are written in full first.
for name in ublk nbd; do
    dbs --quiet volume create "$name" 256MiB
done
attach ublk --queues 2
ublk=$device
nbd-client -nonetlink -connections 2 -unix "$socket" /dev/nbd0 -name nbd >"$work/nbd-client.log" 2>&1
loop=$(losetup -f)
dd if=/dev/zero of=/tmp/loop.img bs=1M count=256 2>/dev/null
losetup "$loop" /tmp/loop.img
for path in "$ublk" /dev/nbd0; do
    dd if=/dev/zero of="$path" bs=1M count=256 oflag=direct 2>/dev/null
done

loads=("randread 4k 32 2" "randwrite 4k 32 2" "read 1m 4 2" "write 1m 4 2")
bench ublk "$ublk" 256
bench NBD /dev/nbd0 256
bench loop "$loop" 256
bench null_blk /dev/nullb0 256
bench_table "a volume: requests a second" 1 ublk NBD loop null_blk
detach ublk
nbd-client -d /dev/nbd0 >/dev/null
losetup -d "$loop"
rm /tmp/loop.img
end_server TERM

# The frontends alone: a controller that answers by itself.
start_controller ublk --null-backend --reactors 2 --frontend-depth 64
bench "ublk alone" /dev/longhorn/vol 96
end_controller TERM
start_controller nbd --null-backend --reactors 2
nbd-client -nonetlink -connections 2 -unix /var/run/longhorn/nbd-vol.sock /dev/nbd0 -name vol >"$work/nbd-client.log" 2>&1
bench "NBD alone" /dev/nbd0 96
nbd-client -d /dev/nbd0 >/dev/null
end_controller TERM
bench_table "no backend: requests a second" 1 "ublk alone" "NBD alone" loop null_blk
rmmod null_blk
