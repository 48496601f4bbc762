# speed of a volume as a ublk device against the same volume over NBD, kernel loop and null_blk, as ratios
# timeout: 600
# needs: dbs attach
# by name only
modprobe ublk_drv
modprobe nbd
modprobe loop
modprobe null_blk nr_devices=1 gb=1 bs=4096 submit_queues=2
seconds=${seconds:-4}
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

# measure DEVICE RW BS DEPTH: requests a second
measure() {
    fio --name=m --filename="$1" --size=256m --rw="$2" --bs="$3" --iodepth="$4" --numjobs=2 --group_reporting --direct=1 \
        --ioengine=io_uring --time_based --ramp_time=1 --runtime="$seconds" --output-format=json \
        --output="$work/fio.json" >"$work/fio.err.log" 2>&1
    jq -r '.jobs[0] | (.read.iops + .write.iops) | round' "$work/fio.json"
}

printf '\n%-24s %10s %10s %10s %10s   %s\n' "requests a second" ublk NBD loop null_blk "ublk/NBD ublk/loop ublk/null_blk"
for test in "randread 4k 32" "randwrite 4k 32" "read 1m 4" "write 1m 4"; do
    read -r rw bs depth <<<"$test"
    found=()
    for path in "$ublk" /dev/nbd0 "$loop" /dev/nullb0; do
        found+=("$(measure "$path" "$rw" "$bs" "$depth")")
    done
    printf '%-24s %10s %10s %10s %10s   %s\n' "$rw $bs, depth 2 x $depth" "${found[@]}" "$(echo "${found[*]}" |
        awk '{ printf "%8.2f %9.2f %13.2f", $1 / $2, $1 / $3, $1 / $4 }')"
done
echo
detach ublk
nbd-client -d /dev/nbd0 >/dev/null
losetup -d "$loop"
rm /tmp/loop.img
rmmod null_blk
