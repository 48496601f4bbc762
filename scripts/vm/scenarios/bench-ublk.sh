# speed of a volume as a ublk device against the same volume over NBD, kernel loop and null_blk, and of the frontends alone
# timeout: 600
# needs: dbs attach, longhorn controller
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

loads=("randread 4k 32" "randwrite 4k 32" "read 1m 4" "write 1m 4")

# rates DEVICE MEBIBYTES: requests a second, for each load.
rates() {
    local rw bs depth load
    for load in "${loads[@]}"; do
        read -r rw bs depth <<<"$load"
        fio --name=m --filename="$1" --size="$2m" --rw="$rw" --bs="$bs" --iodepth="$depth" --numjobs=2 --group_reporting \
            --direct=1 --ioengine=io_uring --time_based --ramp_time=1 --runtime="$seconds" --output-format=json \
            --output="$work/fio.json" >"$work/fio.err.log" 2>&1
        jq -r '.jobs[0] | (.read.iops + .write.iops) | round' "$work/fio.json"
    done
}

# table TITLE NAME...: the rates in `found` by name, and the first name's by each other's.
table() {
    local title=$1 name row
    shift
    {
        echo "$title $* ${*/#/$1/}"
        for row in "${!loads[@]}"; do
            echo "$(tr ' ' _ <<<"${loads[row]}") $(for name in "$@"; do sed -n "$((row + 1))p" <<<"${found[$name]}"; done | xargs)" |
                awk '{ printf "%s", $0; for (i = 2; i <= NF; i++) printf " %.2f", $2 / $i; print "" }'
        done
    } | awk '{ printf "%-16s", $1; for (i = 2; i <= NF; i++) printf " %13s", $i; print "" }'
    echo
}

declare -A found=()
found[ublk]=$(rates "$ublk" 256)
found[NBD]=$(rates /dev/nbd0 256)
found[loop]=$(rates "$loop" 256)
found[null_blk]=$(rates /dev/nullb0 256)
table a_volume ublk NBD loop null_blk
detach ublk
nbd-client -d /dev/nbd0 >/dev/null
losetup -d "$loop"
rm /tmp/loop.img
end_server TERM

# The frontends alone: a controller that answers by itself.
start_controller ublk --null-backend --reactors 2 --frontend-depth 64
found[ublk]=$(rates /dev/longhorn/vol 96)
end_controller TERM
start_controller nbd --null-backend --reactors 2
nbd-client -nonetlink -connections 2 -unix /var/run/longhorn/nbd-vol.sock /dev/nbd0 -name vol >"$work/nbd-client.log" 2>&1
found[NBD]=$(rates /dev/nbd0 96)
nbd-client -d /dev/nbd0 >/dev/null
end_controller TERM
table no_backend ublk NBD loop null_blk
rmmod null_blk
