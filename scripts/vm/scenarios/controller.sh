# a block device over three replicas: one killed and rebuilt under fio, all equal at the end
# timeout: 400
# needs: longhorn controller
modprobe ublk_drv
volume_bytes=$((48 << 20))
ports=()
for n in 0 1 2; do
    start_replica $n $((10000 + 10 * n))
    ports+=(--replica "tcp://127.0.0.1:$((10000 + 10 * n))")
done
start_controller tgt-blockdev "${ports[@]}"
device=/dev/longhorn/vol
# modes: of the replicas, in their order.
modes() {
    steer ls-replica | awk 'NR > 1 { printf "%s ", $2 }'
}

fio --name=load --eta=never --filename="$device" --size=24m --rw=randwrite --bsrange=4k-64k --direct=1 --ioengine=io_uring --rate_iops=100 \
    --iodepth=16 --verify=crc32c --verify_fatal=1 --time_based --runtime=600 --output="$work/fio.log" 2>"$work/fio.err.log" &
load=$!
sleep 2
end_replica 2 KILL
until_true 60 "the dead replica to be ERR" eval '[ "$(modes)" = "RW RW ERR " ]'
kill -0 $load || fail "fio saw an error"
ok "a replica killed under load: fio goes on"

steer rm-replica tcp://127.0.0.1:10020
start_replica 3 10030
steer add-replica tcp://127.0.0.1:10030 --size "$volume_bytes" --current-size "$volume_bytes"
[ "$(modes)" = "RW RW RW " ] || fail "modes: $(modes)"
sleep 1
end_fio $load
ok "another one rebuilt under load: fio read back all it wrote"

end_controller TERM
# What each replica holds, by a controller of its own.
for n in 0 1 3; do
    start_controller ublk --replica "tcp://127.0.0.1:$((10000 + 10 * n))"
    dd if="$device" bs=1M iflag=direct 2>/dev/null | md5sum >"$work/sum.$n"
    end_controller TERM
    end_replica $n TERM
done
cmp "$work/sum.0" "$work/sum.1"
cmp "$work/sum.0" "$work/sum.3"
ok "the three replicas hold the same"
