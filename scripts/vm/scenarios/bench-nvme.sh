# speed of a volume over NVMe/TCP against one over NBD, the kernel's own target (nvmet) and the bare disk
# timeout: 700
# rounds: 3
# by name only
modprobe nvme-tcp
modprobe nvmet-tcp
modprobe nbd
fresh_store
# Two, as a volume that has a writer refuses the writes of others.
for name in nvme nbd; do
    dbs --quiet volume create "$name" 256MiB
done
start_server --nvme tcp:4420
nvmet=/sys/kernel/config/nvmet
mount -t configfs none /sys/kernel/config

# connect NQN PORT: sets `device`.
connect() {
    local nqn=$1
    echo "transport=tcp,traddr=127.0.0.1,trsvcid=$2,nqn=$nqn" >/dev/nvme-fabrics
    appears() {
        # nvmet offers paths, which are further block devices (nvme1c1n1), and hidden.
        device=/dev/$(grep -lx "$nqn" /sys/block/nvme[0-9]n1/device/subsysnqn | cut -d/ -f4)
        [ -b "$device" ]
    }
    until_true 30 "the device of $nqn" appears
}

# The kernel's target has the machine's other disk, which is a file of the host as the store's is.
mkdir "$nvmet/subsystems/kernel" "$nvmet/subsystems/kernel/namespaces/1" "$nvmet/ports/1"
echo 1 >"$nvmet/subsystems/kernel/attr_allow_any_host"
echo /dev/vdb >"$nvmet/subsystems/kernel/namespaces/1/device_path"
echo 1 >"$nvmet/subsystems/kernel/namespaces/1/enable"
for pair in trtype:tcp adrfam:ipv4 traddr:127.0.0.1 trsvcid:4421; do
    echo "${pair#*:}" >"$nvmet/ports/1/addr_${pair%:*}"
done
ln -s "$nvmet/subsystems/kernel" "$nvmet/ports/1/subsystems/kernel"

declare -A devices=([disk]=/dev/vdb)
connect "nqn.2014-08.org.nvmexpress:uuid:$(json .uuid volume show nvme)" 4420
devices[NVMe]=$device
connect kernel 4421
devices[nvmet]=$device
nbd-client -nonetlink -connections 2 -unix "$socket" /dev/nbd0 -name nbd >"$work/nbd-client.log" 2>&1
devices[NBD]=/dev/nbd0

# All are written in full first; and the kernel's target has the disk that it is measured beside.
for name in NVMe NBD nvmet; do
    dd if=/dev/zero of="${devices[$name]}" bs=1M count=256 oflag=direct 2>/dev/null
done
random_file "$work/data" 1
dd if="$work/data" of="${devices[nvmet]}" bs=1M oflag=direct 2>/dev/null
dd if=/dev/vdb of="$work/read" bs=1M count=1 iflag=direct 2>/dev/null
cmp "$work/data" "$work/read"
[ "$(json '[.[] | select(.kind == "nvme_tcp")] | length' clients --interval 0)" -eq 1 ] || fail "not one host of the volume"
ok "a volume over NVMe, one over NBD, and a disk with nvmet and without"

one=("randread 4k 1 1" "randwrite 4k 1 1")
many=("randread 4k 32 2" "randwrite 4k 32 2" "read 1m 4 2" "write 1m 4 2")
loads=("${one[@]}" "${many[@]}")
ways=(NVMe NBD nvmet disk)
seconds=2
for round in $(seq "$rounds"); do
    # Another one is first in each round.
    for turn in "${!ways[@]}"; do
        way=${ways[$(((turn + round) % ${#ways[@]}))]}
        bench "$way" "${devices[$way]}" 256
    done
    ok "round $round of $rounds"
done
loads=("${one[@]}")
bench_table "µs of a request, median" 2 "${ways[@]}"
loads=("${one[@]}" "${many[@]}")
bench_table "requests a second" 1 "${ways[@]}"

nbd-client -d /dev/nbd0 >/dev/null
for controller in /sys/class/nvme/nvme*; do
    echo 1 >"$controller/delete_controller"
done
rm "$nvmet/ports/1/subsystems/kernel"
rmdir "$nvmet/ports/1" "$nvmet/subsystems/kernel/namespaces/1" "$nvmet/subsystems/kernel"
umount /sys/kernel/config
end_server TERM
check_store
